#!/usr/bin/env python3
"""Writes the seed corpora of the fuzz targets, from what the repository already holds.

    seeds.py FOLDER      one folder a target: FOLDER/fuzz_profile, FOLDER/fuzz_wire, ...

Only the standard library; `protoc` (a build dependency) writes the control plane's messages. Seeds are small: a fuzzer
mutates few bytes at a time, and what matters is that each keyword and each branch of a format is somewhere in them.
"""

import json
import pathlib
import struct
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LARGEST = 64 << 10


class Corpora:
    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def add(self, target: str, *seeds: bytes) -> None:
        folder = self.folder / target
        folder.mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            if len(seed) <= LARGEST:
                (folder / f"seed{len(list(folder.iterdir())):04d}").write_bytes(seed)


def load(path: str):
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def compact(value) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


# ---- files of a checkpoint ----


def safetensors(tensors: dict, padding: int = 0) -> bytes:
    """tensors: name -> (dtype, shape, bytes)"""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = compact(header) + b" " * padding
    return struct.pack("<Q", len(text)) + text + data


def checkpoint_seeds(out: Corpora) -> None:
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "U32": 4, "BOOL": 1}
    for dtype, size in sizes.items():
        out.add("fuzz_safetensors", safetensors({"t": (dtype, [2, 3], bytes(range(6 * size)))}))
    out.add(
        "fuzz_safetensors",
        safetensors({}),
        safetensors({"scalar": ("F32", [], b"\0\0\x80?"), "empty": ("F16", [0, 4], b"")}, padding=5),
        safetensors({f"model.layers.{i}.w": ("BF16", [1, 2], b"\x80?\0@") for i in range(4)}),
    )
    configs = sorted((ROOT / "tests/fixtures").glob("*/config.json")) + [ROOT / "deploy/models/sprout/config.json"]
    for config in configs:
        generation = config.with_name("generation_config.json")
        second = b"\0" + generation.read_bytes() if generation.exists() else b""
        out.add("fuzz_model_config", config.read_bytes() + second)


# ---- text: templates, replies, tokenizers, profiles, bodies ----


def template_seeds(out: Corpora) -> None:
    out.add("fuzz_chat_template", load("deploy/models/sprout/tokenizer_config.json")["chat_template"].encode())
    for case in load("tests/coordinator/chat/corpus/features.json"):
        out.add("fuzz_chat_template", case["template"].encode())
    replies = [
        "<think>\nwhy\n</think>\n\nplain é 🌱",
        '<tool_call>\n{"name": "f", "arguments": {"n": 1, "s": "x"}}\n</tool_call>',
        "a<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>b",
        "<tool_call>{\"name\": <tool_call></tool_call></think><thi",
    ]
    corpus = load("tests/coordinator/chat/corpus/replies.json")
    replies += [entry["reply"] for entry in corpus["well_formed"][::3] + corpus["damaged"][::3]]
    for reply in replies:
        for options in (0, 3, 5, 7, 0x1B, 0x3D, 0x5F):
            out.add("fuzz_reply_parser", bytes([options]) + reply.encode())


def tokenizer_seeds(out: Corpora) -> None:
    for path in sorted((ROOT / "tests/coordinator/tokenizer/data").glob("*.json")):
        whole = json.loads(path.read_text(encoding="utf-8"))
        if "model" not in whole:
            continue
        small = dict(whole)  # the byte alphabet and a few merges
        small["model"] = dict(whole["model"])
        small["model"]["vocab"] = {k: v for k, v in whole["model"]["vocab"].items() if v < 300}
        small["model"]["merges"] = [
            m for m in whole["model"]["merges"] if "".join(m if isinstance(m, list) else m.split(" ")) in small["model"]["vocab"]
        ]
        parts = {k: whole[k] for k in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor") if k in whole}
        out.add("fuzz_tokenizer_json", b"\0" + compact(small), b"\1" + compact(parts)[1:-1])
        steps = (whole.get("pre_tokenizer") or {}).get("pretokenizers", [whole.get("pre_tokenizer") or {}])
        for step in steps:
            regex = step.get("pattern", {}).get("Regex")
            if regex:
                out.add("fuzz_tokenizer_json", b"\2" + regex.encode())
    corpus = load("tests/coordinator/tokenizer/data/corpus.json")
    for pieces in corpus.values():
        if isinstance(pieces, list):
            texts = [piece for piece in pieces if isinstance(piece, str)]
            for at in range(0, len(texts), 8):
                out.add("fuzz_tokenizer_text", " ".join(texts[at : at + 8]).encode("utf-8", "surrogatepass"))
    out.add("fuzz_tokenizer_text", b"<|im_start|>user\n\xff\xfe<|im_end|> \xe4\xb8 \xf0\x9f\x8c\xb1")


def profile_seeds(out: Corpora) -> None:
    for path in sorted((ROOT / "deploy/profiles").glob("*.yaml")):
        out.add("fuzz_profile", path.read_bytes())
    out.add("fuzz_profile", b"{a: [1, 2], b: &x {c: !!str d}, e: *x}\n", b"a:\n  - b: |\n      c\n    ? d\n    : e\n")


def body_seeds(out: Corpora) -> None:
    for path in sorted((ROOT / "tests/fuzz/http_body/corpus").iterdir()):
        out.add("fuzz_http_body", path.read_bytes())


# ---- messages between ranks ----


def array(form: str, *values) -> bytes:
    return struct.pack(f"<I{len(values)}{form}", len(values), *values)


def sequence(slot, fresh, mtp, position, accepted, certain, mtp_steps, tokens, pages, wants, snapshot=0xFFFFFFFF):
    head = struct.pack("<IBBIQIIIBI", slot, fresh, mtp, snapshot, position, accepted, certain, mtp_steps, 0, 0)
    rows = b"".join(struct.pack("<II", *want) for want in wants)
    return head + array("i", *tokens) + array("i", *pages) + struct.pack("<I", len(wants)) + rows


def orders() -> bytes:
    """Two drops, a take, a copy, a save with a snapshot, and a load of each step."""
    save = struct.pack("<QQQQQQ", 5, 1, 2, 3, 4, 2048) + array("i", 1, 2, 3) + array("i", 9)
    save += struct.pack("<BIQ", 1, 4, 2050) + array("i", 3, 8)
    loads = [struct.pack("<BQQQ", step, 6, 5, 6) + array("i", *pages) + struct.pack("<II", snapshot, 0)
             for step, pages, snapshot in ((1, [], 0xFFFFFFFF), (2, [5, 6], 9), (3, [], 0xFFFFFFFF))]
    lists = array("I", 3, 65535) + struct.pack("<III", 1, 1023, 4) + struct.pack("<Iii", 1, 7, 8)
    return lists + struct.pack("<I", 1) + save + struct.pack("<I", len(loads)) + b"".join(loads)


def plan(kind: int, release: list, sequences: list, with_orders=False) -> bytes:
    head = struct.pack("<BIQ", kind, 3, 41) + (orders() if with_orders else bytes(20)) + array("I", *release)
    return head + struct.pack("<I", len(sequences)) + b"".join(sequences)


def report(error: str, rows: list) -> bytes:
    text = error.encode()
    head = struct.pack("<IQIII", 3, 41, 1, 812, len(text)) + text
    head += struct.pack("<IQBIQBI", 2, 6, 1, 0, 5, 0, 4) + b"full" + struct.pack("<I", len(rows))
    return head + b"".join(rows)


def row(slot: int, number: int, first: int, candidates: list, logits: list) -> bytes:
    listed = struct.pack("<I", len(candidates)) + b"".join(struct.pack("<fi", *c) for c in candidates)
    return struct.pack("<IIi", slot, number, first) + listed + array("f", *logits)


def state_seeds(out: Corpora) -> None:
    """Headers of states (docs/formats/state.md) without and with a snapshot, as the fuzz target seals them."""
    def text(value: str) -> bytes:
        return struct.pack("<I", len(value)) + value.encode()

    for first, tokens, committed, kept, snapshot in ((0, range(100), 0, [], 0), (2048, range(7), 2050, [5, 6], 333)):
        body = text("0.1.0") + text("00112233445566aa") + struct.pack("<IIQQQQQ", 1, 2, 3, 4, 5, 6, first)
        body += array("i", *tokens) + struct.pack("<BQ", 1, committed) + array("i", *kept)
        out.add("fuzz_state", b"\1" + body + struct.pack("<QQ", 192, snapshot))


def wire_seeds(out: Corpora) -> None:
    full_row = 0xFFFFFFFF
    prompt = sequence(2, 1, 1, 0, 0, 5, 0, [5, 6, 7, 0, 2147483647], [11, 0, 1048575], [(4, full_row)])
    window = sequence(0, 0, 1, 130, 15, 1, 3, [9], [], [(0, 1), (1, 4096), (3, full_row)])
    # The first byte: bit 0 plan or report, bit 1 "seal it" (tests/fuzz/wire/fuzz_wire.cc).
    for body in (plan(1, [7, 1023], [prompt, window]), plan(1, [], [window]), plan(2, [], []), plan(3, [1], []),
                 plan(1, [], [sequence(5, 1, 0, 131, 2, 2, 0, [4, 5], [5, 6, 7], [], 9)], True), plan(2, [], [], True)):
        out.add("fuzz_wire", b"\2" + body)
    rows = [row(2, 4, 256, [], [1.5, -0.0, float("inf")]), row(0, 1, 256, [(3.25, 300), (-1.0, 256)], [])]
    out.add("fuzz_wire", b"\3" + report("", rows), b"\3" + report("rank 1: layer 2 failed", []), b"\0TFPN", b"\1TFRP")


def message(kind: str, text: str) -> bytes:
    command = ["protoc", f"--proto_path={ROOT / 'proto'}", f"--encode=tensorfold.v1.{kind}", "tensorfold/v1/cluster.proto"]
    return subprocess.run(command, input=text.encode(), stdout=subprocess.PIPE, check=True).stdout


def join_seeds(out: Corpora) -> None:
    identity = """protocol: 1 build: "0.1.0" fingerprint: "f00d" checkpoint: "beef" profile: "cafe" slices: "a\\nb"
        rank: 1 world: 2 host: "spark-2" pid: 77 transport: "ucx" transport_address: "\\001\\002\\377" """
    roster = 'epoch: 4 world: 2 ranks { rank: 0 host: "a" transport_address: "x" } ranks { rank: 1 host: "b" transport_address: "y" }'
    out.add("fuzz_join", b"\0" + message("Identity", identity), b"\1" + message("Roster", roster))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Corpora(pathlib.Path(sys.argv[1]))
    for seeds in (checkpoint_seeds, template_seeds, tokenizer_seeds, profile_seeds, body_seeds, wire_seeds, state_seeds, join_seeds):
        seeds(out)


main()
