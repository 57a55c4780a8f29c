#!/usr/bin/env python3
"""What others wait for while a long prompt is read: the gaps between the events of streams, with and without it.

Usage: fill_gaps.py BINARY --model FOLDER [--prompt-tokens 16384] [--streams 4] [--budget-ms 100] [--threads 2]
Needs nothing but Python.

Serves FOLDER, opens streams that decode, then sends a long prompt. In every round each of them gets a token, so the time
from one round's end to the next is what they wait for in the server; the client's own gaps, which a busy machine
stretches, are printed beside. Ends with exit code 1 if the 99th percentile of the rounds' gaps is over twice the budget.
"""
import argparse
import datetime
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

from long_context import free_port, wait_ready


def write_profile(path, args, port):
    with open(path, "w") as file:
        file.write(f"""model:
  path: {os.path.abspath(args.model)}
  served_name: served
cluster:
  world: 1
  coordinator: 127.0.0.1:{free_port()}
compute:
  threads: {args.threads}
memory:
  kv_bytes: 1GiB
schedule:
  max_sequences: 16
  max_batch_rows: 256
  prompt_chunk: 256
  round_budget: {args.budget_ms}ms
http:
  listen: 127.0.0.1:{port}
log:
  level: debug
grpc:
  enabled: false
""")


def post(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


class Stream(threading.Thread):
    """Decodes until it is told to stop; keeps the times of its events."""

    def __init__(self, port, number):
        super().__init__(daemon=True)
        self.port, self.number, self.times, self.stopped = port, number, [], False

    def run(self):
        while not self.stopped:
            reply = post(self.port, {"prompt": [100 + self.number * 7 + i for i in range(20)], "max_tokens": 4000,
                                     "ignore_eos": True, "stream": True, "temperature": 0.8, "seed": self.number})
            for line in reply:
                if self.stopped:
                    reply.close()
                    return
                if line.startswith(b"data: {"):
                    self.times.append(time.monotonic())


def gaps(streams, begin, end):
    out = []
    for stream in streams:
        times = [t for t in stream.times if begin <= t <= end]
        out += [1000 * (b - a) for a, b in zip(times, times[1:])]
    return sorted(out)


def round_gaps(path):
    """Milliseconds between the ends of rounds that held windows and prompt rows, and the round before each."""
    out, last = [], None
    with open(path) as log:
        for line in log:
            found = re.match(r"(\S+ \S+) debug round: (\d+) window rows, (\d+) prompt rows", line)
            if not found:
                continue
            now = datetime.datetime.fromisoformat(found.group(1))
            if last and int(found.group(2)) > 0 and int(found.group(3)) > 0:
                out.append((now - last).total_seconds() * 1000)
            last = now
    return sorted(out)


def percentile(values, part):
    return values[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--budget-ms", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        profile = os.path.join(folder, "profile.yaml")
        write_profile(profile, args, port)
        with open(os.path.join(folder, "server.log"), "w") as log:
            server = subprocess.Popen([args.binary, "serve", "--profile", profile, "--rank", "0"], stderr=log)
        try:
            wait_ready(port, server)
            streams = [Stream(port, i) for i in range(args.streams)]
            for stream in streams:
                stream.start()
            time.sleep(5)
            begin = time.monotonic()
            alone = gaps(streams, begin - 4, begin)
            ids = [8 + (i * 2654435761 >> 7) % 3000 for i in range(args.prompt_tokens)]
            reply = json.load(post(port, {"prompt": ids, "max_tokens": 1, "temperature": 0}))
            end = time.monotonic()
            during = gaps(streams, begin, end)
            for stream in streams:
                stream.stopped = True
        finally:
            server.terminate()
            server.wait(60)
        rounds = round_gaps(os.path.join(folder, "server.log"))
    read = reply["tensorfold"]["prefill_s"]
    for name, values in (("client, before", alone), ("client, while the prompt is read", during), ("rounds", rounds)):
        print(f"{name}: {len(values)} gaps, p50 {percentile(values, 0.5):.1f} ms, p99 {percentile(values, 0.99):.1f} ms, "
              f"longest {values[-1] if values else 0:.1f} ms")
    print(f"prompt: {args.prompt_tokens} tokens in {read:.1f} s, {args.prompt_tokens / read:.0f} tokens/s; budget "
          f"{args.budget_ms} ms")
    return 0 if percentile(rounds, 0.99) <= 2 * args.budget_ms else 1


if __name__ == "__main__":
    sys.exit(main())
