"""The requests that tests send again and again: name -> (path, body).

Chat and completions, greedy and sampled, penalties, and long ones. The same request must give the same token_sha
whatever runs beside it, on any world.
"""

STORY = [{"role": "user", "content": "Tell me a story about a fox named Lily."}]
CSV = "name,age,city\nLily,34,Oslo\nTom,7,Rome\nAnna,61,Lima"
TABLE = [{"role": "user", "content": f"Convert this CSV to JSON:\n{CSV}"}]
FACTS = [{"role": "user", "content": "What is the capital of France?"}]

REQUESTS = {
    "greedy chat": ("/v1/chat/completions", {"messages": FACTS, "temperature": 0}),
    "table, greedy": ("/v1/chat/completions", {"messages": TABLE, "temperature": 0}),
    "story, sampled": ("/v1/chat/completions", {"messages": STORY, "temperature": 1, "seed": 7, "max_tokens": 160}),
    "story, default seed": ("/v1/chat/completions", {"messages": STORY, "max_tokens": 120}),
    "story, top-p": ("/v1/chat/completions", {"messages": STORY, "temperature": 0.8, "top_p": 0.9, "seed": 3,
                                              "max_tokens": 120}),
    "penalties": ("/v1/chat/completions", {"messages": STORY, "temperature": 0.9, "top_k": 40, "min_p": 0.02,
                                           "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.3,
                                           "repetition_penalty": 1.1, "logit_bias": {"300": -5}, "max_tokens": 120}),
    "completion": ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 80}),
    "completion, sampled": ("/v1/completions", {"prompt": "def add(a, b):", "temperature": 1, "seed": 11,
                                                "max_tokens": 80}),
}


def long_request(tokens, **options):
    """A reply that lasts: ends at its length only, one token a pass."""
    return {"messages": STORY, "temperature": 1, "seed": 42, "ignore_eos": True, "max_tokens": tokens, "draft": False,
            **options}
