#!/usr/bin/env python3
"""The demo model's evaluation through the HTTP API of two ranks: at least the 190 of 200 that its README states.

Also the greedy tokens of its reference.

Usage: test_eval.py [--binary PATH] [--show N]

An answer counts when the whole of it equals the expected text and the reply ends there, with a stop token: what the
model's own evaluation counts. The text is that of the reply's token ids, so that tool calls are compared as the model
wrote them; what the API makes of them (content, tool_calls) is checked too.
"""
import concurrent.futures
import json
import os
import struct

from cluster import SPROUT, Checks, Cluster, arguments, finish, show

WANTED = 190
END = {4087, 4089}  # <|endoftext|>, <|im_end|>


def read_ids(path, names):
    """int64 vectors of a safetensors file."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        out = {}
        for name in names:
            entry = header[name]
            begin, end = entry["data_offsets"]
            assert entry["dtype"] == "I64", entry
            file.seek(8 + size + begin)
            out[name] = list(struct.unpack(f"<{(end - begin) // 8}q", file.read(end - begin)))
        return out


def answer(client, item):
    body = {"messages": item["messages"], "temperature": 0, "max_tokens": 400, "return_token_ids": True}
    if item.get("tools"):
        body["tools"] = item["tools"]
    reply = client.replies("/v1/chat/completions", body)[0]
    ids = reply.ids[:-1] if reply.ids and reply.ids[-1] in END else reply.ids
    text = client.post("/detokenize", {"tokens": ids}).json()["prompt"] if ids else ""
    return reply, text, bool(reply.ids) and reply.ids[-1] in END


def check_parsed(checks, item, reply):
    """What the API hands out must say the same as the model's text."""
    if item["expect"].startswith("<tool_call>"):
        call = json.loads(item["expect"].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in reply.tool_calls]
        if found != [(call["name"], call["arguments"])] or reply.finish != "tool_calls" or reply.text:
            checks.check("a right tool call is handed out as one", False,
                         f"{found} {reply.finish} {reply.text!r}, expected {call}")
    elif reply.text != item["expect"] or reply.tool_calls or reply.finish != "stop":
        checks.check("a right answer is handed out as content", False,
                     f"{reply.text!r} {reply.finish}, expected {item['expect']!r}")


def check_eval(checks, cluster, limit):
    with open(os.path.join(SPROUT, "eval.jsonl"), encoding="utf-8") as file:
        items = [json.loads(line) for line in file]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda item: answer(cluster.client, item), items))
    scores, wrong = {}, []
    for item, (reply, text, ended) in zip(items, answers):
        score = scores.setdefault(item["task"], [0, 0])
        score[1] += 1
        if text == item["expect"] and ended:
            score[0] += 1
            check_parsed(checks, item, reply)
        else:
            wrong.append((item["task"], item["messages"][-1]["content"][-80:], item["expect"], text))
    print("  " + ", ".join(f"{task} {right}/{count}" for task, (right, count) in scores.items()))
    for each in wrong[:limit]:
        print("  wrong:", show(each, 400))
    right = len(items) - len(wrong)
    checks.check("exact answers", right >= WANTED and len(items) == 200, f"{right} of {len(items)}, wanted {WANTED}")
    drafted, accepted = (sum(reply.facts[key] for reply, _, _ in answers) for key in ("drafted", "accepted"))
    checks.check("drafts were made and mostly right", drafted > 0, f"{accepted} of {drafted} accepted")


def check_reference(checks, cluster):
    """expected.safetensors: 64 greedy tokens after each of its prompts."""
    names = [f"p{i}.{part}" for i in range(3) for part in ("input_ids", "greedy")]
    expected = read_ids(os.path.join(SPROUT, "expected.safetensors"), names)
    for i in range(3):
        for draft in (True, False):
            reply = cluster.client.complete(expected[f"p{i}.input_ids"], temperature=0, max_tokens=64, ignore_eos=True,
                                            draft=draft, return_token_ids=True)
            checks.check(f"expected.safetensors, p{i}, {'drafted' if draft else 'serial'}: greedy ids",
                         reply.ids == expected[f"p{i}.greedy"], reply.sha)


def main():
    args = arguments(__doc__, ("--show", {"type": int, "default": 5, "help": "wrong answers to print"}))
    checks = Checks()
    with Cluster(args.binary) as cluster:
        cluster.start().wait_ready()
        checks.section("eval.jsonl", check_eval, cluster, args.show)
        checks.section("reference", check_reference, cluster)
    return checks.failures


if __name__ == "__main__":
    finish("test_eval", main)
