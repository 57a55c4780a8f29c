#!/usr/bin/env python3
"""Many users of a true-size model, without its checkpoint: random weights of a shape, served and loaded.

Usage: serve_shape.py BINARY --shape NAME [--format mlx-4bit] [--backend cuda] [--drafts none auto]... [--concurrency 1,4,16]
Needs nothing but Python, and room for the weights in the temporary folder (TMPDIR; qwen3.8-27b in 4 bits: 15 GB).

`tensorfold bench --shape … --write` makes the checkpoint, this adds a tokenizer whose tokens are bytes and numbers,
`tensorfold serve` loads it, and `tensorfold bench serve --check` sends chats at each number of users and compares every
reply's hash with that of the same request alone, serial and uncached. Prints the tables and, for each kind of drafts,
what many users get together against one user without drafts.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

from long_context import byte_tokenizer, free_port, wait_ready

TEMPLATE = ("{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")


def make_model(args, folder):
    subprocess.run([args.binary, "bench", "--shape", args.shape, "--format", args.format, "--write", folder], check=True)
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    config = config.get("text_config", config)
    tokenizer = byte_tokenizer()
    vocabulary = tokenizer["model"]["vocab"]
    for number in range(len(vocabulary), config["vocab_size"]):
        vocabulary[f"<{number}>"] = number
    # A number in brackets is a word, and a word that is a token is taken whole: so a reply that comes back in the next
    # turn's prompt has the tokens that it was written with, as with a real tokenizer, and is found in the prefix cache.
    tokenizer["model"]["ignore_merges"] = True
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "<[0-9]+>"}, "behavior": "Isolated", "invert": False},
        tokenizer["pre_tokenizer"]]}
    with open(os.path.join(folder, "tokenizer.json"), "w") as file:
        json.dump(tokenizer, file)
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump({"chat_template": TEMPLATE}, file)


def serve_and_load(args, folder, model, drafts):
    port = free_port()
    profile = os.path.join(folder, "profile.yaml")
    with open(profile, "w") as file:
        file.write(f"""model:
  path: {model}
  served_name: shape
  context_length: 4096
cluster:
  world: 1
  coordinator: 127.0.0.1:{free_port()}
compute:
  backend: {args.backend}
memory:
  kv_pages: {256 * args.sequences}
cache:
  snapshot_bytes: {args.snapshot_bytes}
draft:
  kind: {drafts}
schedule:
  max_sequences: {args.sequences}
http:
  listen: 127.0.0.1:{port}
grpc:
  enabled: false
""")
    figures = os.path.join(folder, "figures.json")
    with open(os.path.join(folder, "server.log"), "w") as log:
        server = subprocess.Popen([args.binary, "serve", "--profile", profile, "--rank", "0"], stderr=log)
        try:
            wait_ready(port, server)
            print(f"== drafts {drafts}", flush=True)
            outcome = subprocess.run(
                [args.binary, "bench", "serve", "--url", f"http://127.0.0.1:{port}", "--concurrency", args.concurrency,
                 *(["--duration", str(args.duration)] if args.duration else ["--conversations", str(args.conversations)]), "--mix", "chat", "--ignore-eos", "--reply-tokens",
                 str(args.reply_tokens), "--check", "--check-share", str(args.check_share), "--json", figures])
        finally:
            server.terminate()
            server.wait(120)
    if outcome.returncode != 0:
        raise RuntimeError(f"bench serve ended with {outcome.returncode}")
    with open(figures) as file:
        return json.load(file)["levels"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--format", default="mlx-4bit")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--drafts", nargs="+", default=["none", "auto"])
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--duration", type=float, default=0, help="seconds of each level, instead of conversations")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--snapshot-bytes", default="12GiB", help="a state of qwen3.8-27b has 150 MB")
    parser.add_argument("--reply-tokens", type=int, default=128)
    parser.add_argument("--check-share", type=float, default=0.25)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = os.path.join(folder, "model")
        make_model(args, model)
        one = None
        for drafts in args.drafts:
            for level in serve_and_load(args, folder, model, drafts):
                rate = level["reply_tokens_per_s"]
                one = one or rate
                print(f"drafts {drafts}, {level['concurrency']} users: {rate:.0f} reply tokens/s, {rate / one:.2f} x the first")
    return 0


if __name__ == "__main__":
    sys.exit(main())
