#!/usr/bin/env python3
"""A prompt of 131,072 tokens from end to end, and the memory it took beside the plan's.

Usage: long_context.py BINARY [--tokens N] [--chunk ROWS]... [--fixture NAME | --hybrid] [--backend cpu|cuda] [--restore]
Needs nothing but Python; with --backend cuda also nvidia-smi and a GPU that nobody else uses.

A fixture of a tiny model (--hybrid: random weights of eight layers, two of them attention with 4 heads of 256) gets a
longer context and a tokenizer of single bytes, and is served. The prompt goes over HTTP as token ids. The reply's
hash and its log-probabilities must be the same for every chunk size, and with --restore once more in a new server
that finds the prompt on disk. The memory taken (the process's largest resident size, or the GPU's) must be within 5 %
of the total that `tensorfold plan` says.
"""
import argparse
import json
import os
import random
import re
import shutil
import socket
import struct
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


HYBRID = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 512,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}


def hybrid_tensors():
    """Names and shapes of a qwen3_5 checkpoint of HYBRID's sizes."""
    c, d, prefix = HYBRID, HYBRID["hidden_size"], "model.language_model."
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    heads, head = c["num_attention_heads"], c["head_dim"]
    kv = c["num_key_value_heads"] * head
    attention = {"q_proj.weight": [2 * heads * head, d], "k_proj.weight": [kv, d], "v_proj.weight": [kv, d],
                 "o_proj.weight": [d, heads * head], "q_norm.weight": [head], "k_norm.weight": [head]}
    linear = {"in_proj_qkv.weight": [2 * keys + values, d], "in_proj_z.weight": [values, d],
              "in_proj_b.weight": [c["linear_num_value_heads"], d], "in_proj_a.weight": [c["linear_num_value_heads"], d],
              "conv1d.weight": [2 * keys + values, 1, 4], "A_log": [c["linear_num_value_heads"]],
              "dt_bias": [c["linear_num_value_heads"]], "norm.weight": [c["linear_value_head_dim"]],
              "out_proj.weight": [d, values]}
    block = {"input_layernorm.weight": [d], "post_attention_layernorm.weight": [d],
             "mlp.gate_proj.weight": [c["intermediate_size"], d], "mlp.up_proj.weight": [c["intermediate_size"], d],
             "mlp.down_proj.weight": [d, c["intermediate_size"]]}
    tensors = {prefix + "embed_tokens.weight": [c["vocab_size"], d], prefix + "norm.weight": [d],
               "lm_head.weight": [c["vocab_size"], d]}
    for layer, kind in enumerate(c["layer_types"]):
        mixer = ("self_attn.", attention) if kind == "full_attention" else ("linear_attn.", linear)
        for name, shape in [*block.items(), *((mixer[0] + n, s) for n, s in mixer[1].items())]:
            tensors[f"{prefix}layers.{layer}.{name}"] = shape
    return tensors


def write_hybrid(path):
    """bf16 weights of random sign and mantissa, between 2^-6 and 2^-4 in size."""
    source, header, blobs, at = random.Random(7), {}, [], 0
    high = bytes((byte & 0x80) | 0x3C | (byte & 1) for byte in range(256))
    for name, shape in hybrid_tensors().items():
        count = 1
        for extent in shape:
            count *= extent
        values = bytearray(2 * count)
        values[0::2] = source.randbytes(count)
        values[1::2] = source.randbytes(count).translate(high)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(values)]}
        blobs.append(values)
        at += len(values)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for blob in blobs:
            file.write(blob)


def make_model(folder, fixture, context):
    hybrid = fixture is None
    fixture = fixture or "qwen3_5"
    source = os.path.join(SOURCE, "tests", "fixtures", fixture)
    for name in os.listdir(source):
        if name != "expected.safetensors" and not (hybrid and name.endswith(".safetensors")):
            shutil.copy(os.path.join(source, name), folder)
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    text = config.get("text_config", config)
    text["max_position_embeddings"] = context
    if hybrid:
        text.update(HYBRID)
        text.pop("mtp_num_hidden_layers", None)
        write_hybrid(os.path.join(folder, "model.safetensors"))
    with open(path, "w") as file:
        json.dump(config, file)
    with open(os.path.join(folder, "tokenizer.json"), "w") as file:
        json.dump(byte_tokenizer(), file)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def write_profile(path, model, tokens, chunk, port, backend, caching):
    with open(path, "w") as file:
        file.write(f"""model:
  path: {model}
  served_name: long
  context_length: {tokens + 64}
cluster:
  world: 1
  coordinator: 127.0.0.1:{free_port()}
compute:
  backend: {backend}
memory:
  kv_pages: {(tokens + 64) // 64 + 2}
{caching}
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


def cache(state, tokens, hybrid):
    """Off, or with room for a snapshot every 2,048 tokens."""
    if state is None:
        return "cache:\n  enabled: false"
    snapshots = (tokens // 2048 + 3) * (4096 if hybrid else 224)
    return f"cache:\n  snapshot_bytes: {snapshots}KiB\nstate:\n  directory: {state}\n  quota: 40GiB"


def planned_bytes(binary, profile):
    text = subprocess.run([binary, "plan", "--profile", profile], check=True, capture_output=True, text=True).stdout
    print(text.rstrip())
    value, unit = re.search(r"^\s+total\s+([\d.]+) (\w+)", text, re.MULTILINE).groups()
    return float(value) * UNITS[unit]


def peak_bytes(pid):
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+) kB", file.read()).group(1)) * 1024


def gpu_bytes():
    text = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
                          check=True, capture_output=True, text=True).stdout
    return int(text) << 20


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
    body = json.dumps({"prompt": ids, "max_tokens": 32, "temperature": 0, "ignore_eos": True,
                       "logprobs": 5}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body,
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=7200) as reply:
        return json.load(reply)


def serve_once(binary, folder, profile, port, args, taken):
    """One server, one prompt. Its reply, the progress lines of its log, and the memory when ready and at the most."""
    log_path = os.path.join(folder, "server.log")
    with open(log_path, "w") as log:
        server = subprocess.Popen([binary, "serve", "--profile", profile, "--rank", "0"], stderr=log)
        try:
            wait_ready(port, server)
            ready = taken(server.pid)
            started = time.monotonic()
            reply = ask(port, args.tokens)
            seconds = time.monotonic() - started
            peak = taken(server.pid)
        finally:
            server.terminate()
            server.wait(600)
    with open(log_path) as log:
        lines = [line for line in log.read().splitlines() if " prompt tokens, " in line or "restore" in line]
    return reply, lines, ready, peak, seconds


def run(args, folder, chunk):
    model, profile = os.path.join(folder, "model"), os.path.join(folder, "profile.yaml")
    state = os.path.join(folder, "state") if args.restore else None
    os.makedirs(model, exist_ok=True)
    make_model(model, None if args.hybrid else args.fixture, args.tokens + 64)
    port = free_port()
    write_profile(profile, model, args.tokens, chunk, port, args.backend, cache(state, args.tokens, args.hybrid))
    planned = planned_bytes(args.binary, profile)
    before = gpu_bytes() if args.backend == "cuda" else 0
    taken = (lambda _: gpu_bytes() - before) if args.backend == "cuda" else peak_bytes
    outcomes, failures = [], []
    for what in ["cold", "restored"] if args.restore else ["cold"]:
        reply, lines, ready, peak, seconds = serve_once(args.binary, folder, profile, port, args, taken)
        block = reply["tensorfold"]
        print(f"chunk {chunk}, {what}: {reply['usage']['prompt_tokens']} prompt tokens in {block['prefill_s']:.1f} s "
              f"(whole reply {seconds:.1f} s), {args.tokens / block['prefill_s']:.0f} tokens/s, {block['cached']} cached; "
              f"token_sha {block['token_sha']}; {len(lines)} lines of progress")
        for line in lines[:: max(1, len(lines) // 8)]:
            print("  " + line)
        print(f"  memory: {ready / (1 << 20):.1f} MiB when ready, {peak / (1 << 20):.1f} MiB at most, planned "
              f"{planned / (1 << 20):.1f} MiB: {100 * (peak / planned - 1):+.1f} %", flush=True)
        if abs(peak / planned - 1) > 0.05:
            failures.append(f"chunk {chunk}, {what}: {peak / planned:.3f} of the planned memory was used")
        if reply["usage"]["prompt_tokens"] != args.tokens:
            failures.append("the prompt's tokens are not those that were sent")
        if what == "cold" and block["prefill_s"] > 12 and not lines:
            failures.append("no line of progress in the log")
        if what == "restored" and block["cached"] < args.tokens - 4096:
            failures.append(f"only {block['cached']} tokens came from disk")
        outcomes.append((block["token_sha"], json.dumps(reply["choices"][0]["logprobs"])))
    return outcomes, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--chunk", type=int, action="append", help="prompt rows a pass; may be repeated")
    parser.add_argument("--fixture", default="qwen3_5")
    parser.add_argument("--hybrid", action="store_true", help="random weights of a larger hybrid instead of a fixture")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--restore", action="store_true", help="the same again from states on disk")
    args = parser.parse_args()
    outcomes, failures = [], []
    for chunk in args.chunk or [256]:
        with tempfile.TemporaryDirectory() as folder:
            found, problems = run(args, folder, chunk)
            outcomes += found
            failures += problems
    if len(set(outcomes)) != 1:
        failures.append(f"replies or their log-probabilities differ: {[sha for sha, _ in outcomes]}")
    for failure in failures:
        print("FAILED: " + failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
