#!/usr/bin/env python3
"""The `openai` Python client against two ranks: chat and completions, streamed and not, models, logprobs, tools, n, and
errors as the client's own exception types.

Usage: test_openai_client.py [--binary PATH]        needs: pip install openai
"""
import json
import math

from cluster import Checks, Cluster, arguments, finish
from outcome import need_packages

STORY = [{"role": "user", "content": "Tell me a story about a fox named Lily."}]
TOOLS = [{"type": "function", "function": {
    "name": "roll_dice", "description": "Roll a die",
    "parameters": {"type": "object", "required": ["sides"],
                   "properties": {"sides": {"type": "integer", "description": "Number of sides"}}}}}]
ROLL = [{"role": "user", "content": "Roll a die with 10 sides."}]


def check_chat(checks, client):
    plain = client.chat.completions.create(model="sprout", messages=STORY, temperature=0.8, seed=3, max_tokens=80)
    checks.check("chat: object", plain.object == "chat.completion" and plain.choices[0].message.role == "assistant" and
                 plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens, plain.usage)
    facts = plain.model_extra["tensorfold"]
    serial = client.chat.completions.create(model="sprout", messages=STORY, temperature=0.8, seed=3, max_tokens=80,
                                            extra_body={"draft": False})
    checks.equal("chat: draft false through extra_body", serial.model_extra["tensorfold"]["token_sha"],
                 facts["token_sha"])
    text, last, reason, usage = "", None, None, None
    for chunk in client.chat.completions.create(model="sprout", messages=STORY, temperature=0.8, seed=3, max_tokens=80,
                                                stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        last, usage = (chunk.model_extra or {}).get("tensorfold") or last, chunk.usage or usage
    checks.equal("chat stream: text", text, plain.choices[0].message.content)
    checks.equal("chat stream: token_sha", (last or {}).get("token_sha"), facts["token_sha"])
    checks.equal("chat stream: finish and usage", (reason, usage), (plain.choices[0].finish_reason, plain.usage))
    three = client.chat.completions.create(model="sprout", messages=STORY, temperature=1, seed=3, max_tokens=30, n=3)
    checks.equal("n: choices", [choice.index for choice in three.choices], [0, 1, 2])
    parts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(model="sprout", messages=STORY, temperature=1, seed=3, max_tokens=30,
                                                n=3, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    checks.equal("n: streamed", list(parts.values()), [choice.message.content for choice in three.choices])


def check_logprobs(checks, client):
    ask = dict(model="sprout", messages=STORY, temperature=0, max_tokens=20, logprobs=True, top_logprobs=4)
    plain = client.chat.completions.create(**ask).choices[0]
    tokens = plain.logprobs.content
    checks.equal("logprobs: the tokens make the text", "".join(token.token for token in tokens), plain.message.content)
    good = all(len(t.top_logprobs) == 4 and t.top_logprobs[0].token == t.token and t.logprob <= 0 and
               sum(math.exp(top.logprob) for top in t.top_logprobs) < 1.0001 for t in tokens)
    checks.check("logprobs: greedy takes the best, probabilities add up to at most 1", good, len(tokens))
    streamed = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        if chunk.choices and chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    pairs = lambda entries: [(entry.token, entry.logprob) for entry in entries]
    checks.check("logprobs: streamed", pairs(streamed) == pairs(tokens), len(streamed))
    done = client.completions.create(model="sprout", prompt="Once upon a time", temperature=0, max_tokens=10,
                                     logprobs=2).choices[0]
    sizes = [len(part) for part in (done.logprobs.tokens, done.logprobs.token_logprobs, done.logprobs.top_logprobs)]
    checks.check("completion logprobs", sizes == [10] * 3 and "".join(done.logprobs.tokens) == done.text,
                 done.logprobs.tokens)


def check_tools(checks, client):
    ask = dict(model="sprout", messages=ROLL, tools=TOOLS, temperature=0, max_tokens=80)
    reply = client.chat.completions.create(**ask).choices[0]
    call = reply.message.tool_calls[0] if reply.message.tool_calls else None
    checks.check("tools: a call", call is not None and reply.finish_reason == "tool_calls" and call.function.name ==
                 "roll_dice" and json.loads(call.function.arguments) == {"sides": 10}, reply.message)
    name, arguments, reason = "", "", None
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                name += part.function.name or ""
                arguments += part.function.arguments or ""
    checks.check("tools: streamed", (name, json.loads(arguments or "null"), reason) ==
                 ("roll_dice", {"sides": 10}, "tool_calls"), (name, arguments, reason))
    if call is None:
        return
    history = ROLL + [reply.message.model_dump(exclude_none=True),
                      {"role": "tool", "tool_call_id": call.id, "content": "{\"result\": 7}"}]
    after = client.chat.completions.create(model="sprout", messages=history, tools=TOOLS, temperature=0, max_tokens=60)
    content = after.choices[0].message.content
    checks.check("tools: the result is answered", "7" in (content or ""), content)
    none = client.chat.completions.create(**ask, tool_choice="none").choices[0]
    checks.check("tools: tool_choice none", not none.message.tool_calls, none.message.content)


def check_completions(checks, client):
    plain = client.completions.create(model="sprout", prompt="Once upon a time", temperature=0, max_tokens=40)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(
        model="sprout", prompt="Once upon a time", temperature=0, max_tokens=40, stream=True) if chunk.choices)
    checks.check("completion: streamed is plain", text == plain.choices[0].text and len(text) > 20, repr(text[:60]))
    two = client.completions.create(model="sprout", prompt=["Once upon a time", "def add(a, b):"], temperature=0,
                                    max_tokens=40)
    checks.equal("completion: two prompts", (len(two.choices), two.choices[0].text), (2, plain.choices[0].text))
    models = client.models.list().data
    checks.equal("models", [model.id for model in models], ["sprout"])
    checks.equal("one model", client.models.retrieve("sprout").id, "sprout")


def check_errors(checks, client, openai):
    def raised(kind, **ask):
        try:
            client.chat.completions.create(**{"model": "sprout", "messages": STORY, **ask})
        except openai.APIStatusError as error:
            return checks.check(f"error: {kind.__name__}", isinstance(error, kind),
                                f"{type(error).__name__} {error.code} {error.param}")
        return checks.check(f"error: {kind.__name__}", False, "nothing was raised")
    raised(openai.BadRequestError, temperature=7)
    raised(openai.BadRequestError, messages=[{"role": "user", "content": "word " * 40000}])
    raised(openai.NotFoundError, model="gpt-none")
    raised(openai.BadRequestError, extra_body={"no_such_option": 1})


def main():
    args = arguments(__doc__)
    need_packages("openai")
    import openai
    checks = Checks()
    with Cluster(args.binary) as cluster:
        cluster.start().wait_ready()
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key="none", max_retries=0,
                               timeout=60)
        checks.section("chat", check_chat, client)
        checks.section("logprobs", check_logprobs, client)
        checks.section("tools", check_tools, client)
        checks.section("completions and models", check_completions, client)
        checks.section("errors", check_errors, client, openai)
    return checks.failures


if __name__ == "__main__":
    finish("test_openai_client", main)
