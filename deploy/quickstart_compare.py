"""Asks a TensorFold server one question with drafts and once without, prints both, and compares their token_sha."""
import json
import sys
import urllib.request

QUESTION = "Copy this text exactly: In winter the elephant sleeps longer than in autumn, and in spring it wakes before the others do."


def ask(base, draft):
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200, "draft": draft}
    request = urllib.request.Request(base + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def main():
    base = sys.argv[1]
    ask(base, True)  # the first request also measures what passes cost
    shas = []
    for name, draft in (("drafted", True), ("serial", False)):
        reply = ask(base, draft)
        facts = reply["tensorfold"]
        tokens = reply["usage"]["completion_tokens"]
        rate = (tokens - 1) / facts["decode_s"] if facts["decode_s"] > 0 else 0.0
        print(f"{name}: {reply['choices'][0]['message']['content']!r}")
        print(f"  {tokens} tokens, {rate:.0f} tok/s, {facts['rounds']} rounds, drafted {facts['drafted']}, "
              f"accepted {facts['accepted']}, token_sha {facts['token_sha']}")
        shas.append(facts["token_sha"])
    if shas[0] != shas[1]:
        print("token_sha DIFFERS")
        return 1
    print(f"token_sha equal: {shas[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
