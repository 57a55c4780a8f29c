#!/usr/bin/env python3
"""Fixtures that nobody has seen: other seeds, widths and depths, every MLX bit width and group, MLX's own layout.

Usage: fresh_fixtures.py --generator make_fixtures.py --test BUILD/tests/worker/model/fixtures_test
Needs: pip install torch transformers safetensors      (transformers 5.17 or later)

`make_fixtures.py` (the script that wrote tests/fixtures) makes random checkpoints with float64 logits, once as it is
and once with --wide. Of those, copies are quantised as MLX does it, with the float64 logits of the dequantised
weights. Then the C++ test is run over all of them; each error must stay below 2e-4 of the logits' standard deviation.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

from outcome import finish, need_packages

FAMILIES = ("llama", "llama3_rope", "qwen3", "qwen3_base128", "qwen3_5", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "nemotron_h",
            "qwen4_exp", "glm5_next", "deepseek_v4")
# Runs the generator with topk's ties as the contract has them.
WITH_STABLE_TOPK = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); import reference_tools; sys.argv.pop(0); " \
    "runpy.run_path(sys.argv[0], run_name='__main__')"
TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures")
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)


def make(generator, out, seed, *flags):
    command = [sys.executable, "-c", WITH_STABLE_TOPK, TOOLS, generator, out, "--seed", str(seed), "--only", ",".join(FAMILIES), *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    lines = [line for line in run.stdout.splitlines() if ": ok" in line or "FAILED" in line]
    print("\n".join(lines), flush=True)
    made = [name for name in FAMILIES if any(line.startswith(name + ": ok") for line in lines)]
    if run.returncode != 0 or len(made) != len(FAMILIES):
        raise RuntimeError(f"{generator} failed:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")


class Reference:
    """A checkpoint's float64 model, whose weights can be replaced."""

    def __init__(self, folder):
        import torch
        import transformers
        from safetensors.torch import load_file
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)
        self.tensors = load_file(os.path.join(folder, "model.safetensors"))
        expected = load_file(os.path.join(folder, "expected.safetensors"))
        self.ids, self.positions = expected["input_ids"], expected["positions"]
        kind = getattr(transformers, self.config["architectures"][0])
        model = kind.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").double().eval()
        for module in model.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and buffer.dtype == torch.bfloat16:
                    module._buffers[name] = buffer.double()
        self.model = model

    def logits(self, exact):
        """Logits with the tensors named in `exact` (the checkpoint's own names) replaced; the model stays as it was."""
        import torch
        state = self.model.state_dict()
        kept = {name: state[name].clone() for name in exact}
        for name, values in exact.items():
            state[name].copy_(values)
        with torch.no_grad():
            rows = self.model(input_ids=self.ids[None], use_cache=False).logits[0][self.positions]
        for name, values in kept.items():
            state[name].copy_(values)
        return rows.float().contiguous()

    def write(self, folder, tensors, exact, quantization):
        from safetensors.torch import save_file
        os.makedirs(folder)
        config = dict(self.config)
        if quantization:
            config.update(quantization=quantization, quantization_config=quantization)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
                  os.path.join(folder, "model.safetensors"), metadata={"format": "mlx"})
        save_file({"input_ids": self.ids, "positions": self.positions, "logits": self.logits(exact)},
                  os.path.join(folder, "expected.safetensors"))


def quantise_all(source, out):
    """All bits and groups of a qwen3; a tied llama; a qwen3_5 in MLX's layout, plain and quantised."""
    import torch
    import mlx_layout
    qwen3 = Reference(os.path.join(source, "qwen3_base128"))
    down, gate = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.gate_proj"
    for bits in BITS:
        for group in GROUPS:
            stored, exact, config = mlx_layout.quantised(qwen3.tensors, bits, group)
            qwen3.write(os.path.join(out, f"mlx_qwen3_{bits}bit_g{group}"), stored, exact, config)
    mixed = mlx_layout.quantised(qwen3.tensors, 4, 64, {down: (8, 32), gate: None}, torch.float16)
    qwen3.write(os.path.join(out, "mlx_qwen3_mixed_f16"), *mixed)
    llama = Reference(os.path.join(source, "llama"))
    llama.write(os.path.join(out, "mlx_llama_tied_4bit"), *mlx_layout.quantised(llama.tensors, 4, 32))

    qwen3_5 = Reference(os.path.join(source, "qwen3_5"))
    tensors, norms = mlx_layout.qwen3_5_layout(qwen3_5.tensors)
    own = {mlx_layout.mlx_name(name): name for name in qwen3_5.tensors}  # MLX's name -> the checkpoint's
    named = lambda exact: {own[name]: values for name, values in exact.items()}
    qwen3_5.write(os.path.join(out, "mlx_qwen3_5_bf16"), tensors, named(norms), None)
    for bits in (3, 4, 8):
        over = {"language_model.model.layers.3.self_attn.o_proj": (8, 32)}
        stored, exact, config = mlx_layout.quantised(tensors, bits, 32, over)
        qwen3_5.write(os.path.join(out, f"mlx_qwen3_5_{bits}bit"), stored, named({**norms, **exact}), config)


def run_test(test, folder, failures):
    """One run of the C++ test a fixture, so that one that is refused does not hide the others."""
    environment = dict(os.environ)
    for name in sorted(os.listdir(folder)):
        with tempfile.TemporaryDirectory() as alone:
            os.symlink(os.path.join(os.path.abspath(folder), name), os.path.join(alone, name))
            environment["TENSORFOLD_FIXTURES"] = alone
            command = [test, "--gtest_filter=Fixtures.LogitsAgreeWithFloat64:Fixtures.GreedyContinuationsAgree"]
            run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
            mine = [line for line in run.stdout.splitlines() if line.startswith(alone)]
        plain = max((float(x) for line in mine for x in re.findall(r"worst logit error (\S+)", line)), default=None)
        mtp = max((float(x) for line in mine for x in re.findall(r"worst MTP logit error (\S+)", line)), default=None)
        text = "no result" if plain is None else f"logits {plain:.1e}" + ("" if mtp is None else f", MTP {mtp:.1e}")
        print(f"  {name}: {text}{'' if run.returncode == 0 else ' FAILED'}", flush=True)
        if run.returncode != 0 or plain is None:
            reason = [line for line in run.stdout.splitlines() if line.strip() and "worst" not in line and
                      not line.startswith("[")]
            failures.append(f"{name}: {' | '.join(reason[-12:])[:1500]}{run.stderr[-300:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", required=True, help="path of make_fixtures.py")
    parser.add_argument("--test", required=True, help="path of the built fixtures_test")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", help="keep the fixtures here (a folder that does not exist)")
    args = parser.parse_args()
    need_packages("torch", "transformers", "safetensors")
    failures = []
    with tempfile.TemporaryDirectory() as scratch:
        root = args.out or scratch
        sets = {name: os.path.join(root, name) for name in ("plain", "wide", "mlx", "mlx_wide")}
        make(args.generator, sets["plain"], args.seed)
        make(args.generator, sets["wide"], args.seed + 1, "--wide")
        quantise_all(sets["plain"], sets["mlx"])
        quantise_all(sets["wide"], sets["mlx_wide"])
        for name, folder in sets.items():
            print(f"{name}:")
            run_test(args.test, folder, failures)
    return failures


if __name__ == "__main__":
    finish("fresh_fixtures", main)
