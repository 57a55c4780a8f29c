#!/usr/bin/env python3
"""A prompt of 131,072 tokens from end to end on the CPU, and the memory it took beside the plan's.

Usage: long_context.py BINARY [--tokens N] [--chunk ROWS]... [--fixture NAME]
Needs nothing but Python.

A fixture of a tiny model gets a longer context and a tokenizer of single bytes, and is served. The prompt goes over
HTTP as token ids; the reply's hash must be the same for every chunk size, and the process's largest resident size
must be within 5 % of the total that `tensorfold plan` says.
"""
import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def byte_tokenizer():
    """Every byte is a token, written as the byte-level alphabet writes it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {}, 256
    for byte in range(256):
        if byte in plain:
            letters[chr(byte)] = byte
        else:
            letters[chr(extra)] = byte
            extra += 1
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": letters,
                      "merges": []}}


def make_model(folder, fixture, context):
    source = os.path.join(SOURCE, "tests", "fixtures", fixture)
    for name in os.listdir(source):
        if name != "expected.safetensors":
            shutil.copy(os.path.join(source, name), folder)
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    config.get("text_config", config)["max_position_embeddings"] = context
    with open(path, "w") as file:
        json.dump(config, file)
    with open(os.path.join(folder, "tokenizer.json"), "w") as file:
        json.dump(byte_tokenizer(), file)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def write_profile(path, model, tokens, chunk, port):
    with open(path, "w") as file:
        file.write(f"""model:
  path: {model}
  served_name: long
  context_length: {tokens + 64}
cluster:
  world: 1
  coordinator: 127.0.0.1:{free_port()}
memory:
  kv_pages: {(tokens + 64) // 64 + 2}
cache:
  enabled: false
schedule:
  max_sequences: 1
  max_batch_rows: {chunk}
  prompt_chunk: {chunk}
  round_budget: 1m
  request_timeout: 2h
http:
  listen: 127.0.0.1:{port}
  idle_timeout: 2h
grpc:
  enabled: false
""")


def planned_bytes(binary, profile):
    text = subprocess.run([binary, "plan", "--profile", profile], check=True, capture_output=True, text=True).stdout
    print(text.rstrip())
    value, unit = re.search(r"^\s+total\s+([\d.]+) (\w+)", text, re.MULTILINE).groups()
    return float(value) * UNITS[unit]


def peak_bytes(pid):
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+) kB", file.read()).group(1)) * 1024


def wait_ready(port, server):
    for _ in range(600):
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).status == 200:
                return
        except OSError:
            pass
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        time.sleep(0.2)
    raise RuntimeError("the server is not ready after two minutes")


def ask(port, tokens):
    state, ids = 12345, []
    for _ in range(tokens):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        ids.append(8 + (state >> 33) % 240)
    body = json.dumps({"prompt": ids, "max_tokens": 32, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body,
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=7200) as reply:
        return json.load(reply)


def run(binary, folder, fixture, tokens, chunk):
    model, profile = os.path.join(folder, "model"), os.path.join(folder, "profile.yaml")
    os.makedirs(model, exist_ok=True)
    make_model(model, fixture, tokens + 64)
    port = free_port()
    write_profile(profile, model, tokens, chunk, port)
    planned = planned_bytes(binary, profile)
    with open(os.path.join(folder, "server.log"), "w") as log:
        server = subprocess.Popen([binary, "serve", "--profile", profile, "--rank", "0"], stderr=log)
        try:
            wait_ready(port, server)
            ready = peak_bytes(server.pid)
            reply = ask(port, tokens)
            peak = peak_bytes(server.pid)
        finally:
            server.terminate()
            server.wait(60)
    with open(os.path.join(folder, "server.log")) as log:
        lines = [line for line in log.read().splitlines() if " prompt tokens, " in line]
    block = reply["tensorfold"]
    print(f"chunk {chunk}: {reply['usage']['prompt_tokens']} prompt tokens in {block['prefill_s']:.1f} s, "
          f"{tokens / block['prefill_s']:.0f} tokens/s; token_sha {block['token_sha']}; {len(lines)} lines of progress")
    for line in lines[:1] + lines[-1:]:
        print("  " + line)
    print(f"  memory: {ready / (1 << 20):.1f} MiB when ready, {peak / (1 << 20):.1f} MiB at most, planned "
          f"{planned / (1 << 20):.1f} MiB: {100 * (peak / planned - 1):+.1f} %")
    failures = []
    if abs(peak / planned - 1) > 0.05:
        failures.append(f"chunk {chunk}: {peak / planned:.3f} of the planned memory was used")
    if reply["usage"]["prompt_tokens"] != tokens:
        failures.append("the prompt's tokens are not those that were sent")
    if block["prefill_s"] > 12 and not lines:
        failures.append("no line of progress in the log")
    return block["token_sha"], failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--chunk", type=int, action="append", help="prompt rows a pass; may be repeated")
    parser.add_argument("--fixture", default="qwen3_5")
    args = parser.parse_args()
    hashes, failures = {}, []
    for chunk in args.chunk or [256]:
        with tempfile.TemporaryDirectory() as folder:
            hashes[chunk], problems = run(args.binary, folder, args.fixture, args.tokens, chunk)
            failures += problems
    if len(set(hashes.values())) != 1:
        failures.append(f"replies differ by chunk: {hashes}")
    for failure in failures:
        print("FAILED: " + failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
