"""What the prefix cache saves on a long prompt, and that nobody can tell by the bytes:

- a prompt that is sent again starts in at most 2 % of the time that it took cold
- a turn after a reply computes its new tokens and the reply's last one, no others
- an edited last turn, and the same turn again, start late too
- each of these replies has the token_sha of a run without cache and drafts

Serves the demo model on one rank. Standard library only. Exit code 0: all of it holds; 1: what does not; 77: no program.
"""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cluster"))

from cluster import Checks, Cluster, arguments, finish  # noqa: E402

REPLY = 48
TURN = 40


def text(count, first):
    return [8 + (first + i * 2654435761 >> 7) % 3000 for i in range(count)]


class Server:
    def __init__(self, checks, cluster):
        self.checks, self.client = checks, cluster.client

    def run(self, prompt, **more):
        """The reply's block, with its ids; asserts that nothing but the time differs from a cold serial run."""
        body = {"prompt": prompt, "max_tokens": REPLY, "ignore_eos": True, "temperature": 0.7, "seed": 5, "return_token_ids": True, **more}
        reply = self.client.post("/v1/completions", body)
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.body[:300]}")
        return reply.json()["tensorfold"]

    def same(self, name, prompt, sha):
        self.checks.equal(f"{name}: token_sha without cache and drafts", self.run(prompt, cache=False, draft=False)["token_sha"], sha)


def run(checks, args):
    sections = {"cluster": {"world": 1}, "memory": {"kv_bytes": "1GiB"},
                "schedule": {"max_sequences": 4, "max_batch_rows": 256, "prompt_chunk": 256}}
    with Cluster(args.binary, world=1, **sections) as cluster:
        cluster.start().wait_ready()
        server = Server(checks, cluster)
        prompt = text(args.prompt_tokens, 1)
        cold = server.run(prompt)
        checks.equal("the first time nothing is cached", cold["cached"], 0)
        shares = []
        for _ in range(args.repeats):
            again = server.run(prompt)
            shares.append(again["prefill_s"] / cold["prefill_s"])
            checks.equal("sent again: token_sha", again["token_sha"], cold["token_sha"])
            checks.check("sent again: all but the last page is cached", len(prompt) - again["cached"] <= 64, again["cached"])
        best = min(shares)
        checks.check("sent again: starts in at most 2 % of the cold time", best <= 0.02,
                     f"cold {cold['prefill_s']:.2f} s, again {best:.2%} (each: " + ", ".join(f"{share:.2%}" for share in shares) + ")")
        server.same("the prompt", prompt, cold["token_sha"])

        history = prompt + cold["token_ids"]
        turn = history + text(TURN, 7)
        after = server.run(turn)
        checks.check("a turn after the reply computes the new tokens and the reply's last one", len(turn) - after["cached"] <= TURN + 1,
                     f"{len(turn)} tokens, {after['cached']} cached")
        server.same("the turn", turn, after["token_sha"])
        edited = history + text(TURN, 1000)
        other = server.run(edited)
        checks.check("an edited last turn starts behind the reply", len(edited) - other["cached"] <= TURN + 64, other["cached"])
        server.same("the edited turn", edited, other["token_sha"])
        checks.equal("the turn again: token_sha", server.run(turn)["token_sha"], after["token_sha"])
        print(json.dumps({"prompt_tokens": len(prompt), "cold_s": cold["prefill_s"], "again_share": best,
                          "turn_computed": len(turn) - after["cached"], "edited_computed": len(edited) - other["cached"]}))
        checks.equal("the rank ends with", cluster.terminate(60), {0: 0})
    return checks.failures


def main():
    args = arguments(__doc__,
                     ("--prompt-tokens", {"type": int, "default": 16384, "help": "length of the prompt"}),
                     ("--repeats", {"type": int, "default": 3, "help": "how often it is sent again; the best counts"}))
    return run(Checks(), args)


if __name__ == "__main__":
    finish("resent_prompt", main)
