#!/usr/bin/env python3
"""Writes data/*.json and data/golden.* : what the Hugging Face library makes of a generated corpus.

    pip install tokenizers==0.23.3 && python3 make_golden.py

The corpus is not stored: tokenizer_golden_test.cc generates the same bytes from data/corpus.json with the same random
numbers (see Random and make_line in both files). Per line and column golden.bin holds the first four bytes of the SHA-256
of the ids, written in decimal and joined by commas. The small tokenizers, one per family of pre-tokenizers, are trained
here on the same kind of text.
"""
import hashlib
import json
import os

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(HERE, "data")
ROOT = os.path.normpath(os.path.join(HERE, "..", "..", ".."))
LINES, DECODE_CASES = 10000, 500
CORPUS_SEED, DECODE_SEED, TRAIN_SEED = 20240601, 7, 99
MASK = (1 << 64) - 1

QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""]
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# No model's: the rest of what the translator reads.
ODDITIES = r"(?<=\p{Nd})(?=(?:\p{Nd}{3})+\b)|\p{Han}{2}?|[^\S\r\n]{,3}\u00e9|(?>\w{1,3}+)\b|[\p{Hiragana}\p{Katakana}ー]++|^\#+|;$|\h{2,4}?(?![a-f])|[^\p{Lu}a-m]*?z|\x{2000}?\P{L}\W\D"


class Random:
    """splitmix64."""

    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return (z ^ (z >> 31)) % n


def make_line(random, pools):
    out = bytearray()

    def pick(name):
        out.extend(pools[name][random.below(len(pools[name]))].encode())

    for _ in range(1 + random.below(12)):
        kind = random.below(20)
        if kind < 9:
            if random.below(2):
                out.append(0x20)
            pick("words")
        elif kind == 9:
            pick("code")
        elif kind < 13:
            low, high = pools["ranges"][random.below(len(pools["ranges"]))]
            for _ in range(1 + random.below(6)):
                out.extend(chr(low + random.below(high - low + 1)).encode())
        elif kind < 15:
            for _ in range(1 + random.below(4)):
                pick("whitespace")
        elif kind == 15:
            pick("special")
        elif kind == 16:
            for _ in range(1 + random.below(9)):
                out.append(0x30 + random.below(10))
        elif kind == 17:
            pick("emoji")
        elif kind == 18:
            pick("controls")
        elif random.below(2):
            out.extend(bytes.fromhex(pools["malformed"][random.below(len(pools["malformed"]))]))
        else:
            for _ in range(1 + random.below(5)):
                out.extend(chr(0x300 + random.below(0x70)).encode())
    return bytes(out)


def make_lines(seed, count, pools):
    random = Random(seed)
    return [make_line(random, pools) for _ in range(count)]


def train(pre_tokenizer, normalizer, added, text, size=2000):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return json.loads(tokenizer.to_str())


def sequence(*regexes):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r), "isolated") for r in regexes] +
                                   [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def control(text, **flags):
    return AddedToken(text, special=True, normalized=False, **flags)


def word(text, **flags):
    return AddedToken(text, special=False, **flags)


def build_tokenizers(text):
    chatml = [control("<|endoftext|>"), control("<|im_start|>"), control("<|im_end|>"), word("<think>", normalized=False),
              word("</think>", normalized=False), word("<tool_call>", normalized=False)]
    out = {}
    out["qwen3_5"] = train(sequence(QWEN35), normalizers.NFC(), chatml + [word("<e\u0301>", normalized=True)], text)
    out["qwen2"] = train(sequence(QWEN2), normalizers.NFC(),
                         chatml + [control("<mask>", lstrip=True), control("<pad>", rstrip=True), word("alone", single_word=True, normalized=False)], text)

    llama = train(sequence(LLAMA3), None, [], text)
    for w in ["Ġtokenizer", "Ġthey", "Ångström".encode().decode("latin-1"), "Ġworld", "cafe", "snake", "Ġof", "çļĦäºº"]:
        if w not in llama["model"]["vocab"]:
            llama["model"]["vocab"][w] = len(llama["model"]["vocab"])
    llama["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(llama))
    tokenizer.add_special_tokens([control("<|begin_of_text|>"), control("<|eot_id|>"), control("[gMASK]"), control("<sop>")])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B:1", special_tokens=[("<|begin_of_text|>", begin)])])
    out["llama3"] = json.loads(tokenizer.to_str())

    out["deepseek"] = train(sequence(*DEEPSEEK), normalizers.Sequence([]),
                            [control("<｜begin▁of▁sentence｜>"), word("<｜User｜>", normalized=True), word("<｜Assistant｜>", normalized=True), word("<think>", normalized=True)], text)
    out["deepseek"]["model"]["merges"] = [" ".join(m) for m in out["deepseek"]["model"]["merges"]]
    out["tekken"] = train(sequence(TEKKEN), None, [control("[INST]"), control("[/INST]"), control("<s>"), control("</s>"), control("<|im_end|>")], text)
    out["gpt2"] = train(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=True)]), None,
                        [control("<|endoftext|>"), control("<mask>", lstrip=True, rstrip=True), word("  ", normalized=True), word("    ", normalized=True),
                         word("alone", single_word=True, lstrip=True), word("abc"), word("ab"), word("<É>")], text)
    out["oddities"] = train(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(ODDITIES), "isolated"), pre_tokenizers.Split("=", "merged_with_previous"), pre_tokenizers.Split(Regex(r"\t|-"), "merged_with_next"),
        pre_tokenizers.Split(Regex(r"[!?]"), "contiguous"), pre_tokenizers.Split(Regex(r"\x00|\(|\."), "removed"), pre_tokenizers.Split(Regex(r"o+"), "isolated", invert=True),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), normalizers.Sequence([normalizers.NFC()]), [control("<|a|>"), word("<|a|><|a|>b|>", normalized=False)], text)
    return out


def digest(text):
    return hashlib.sha256(text.encode()).digest()[:4]


def main():
    with open(os.path.join(DATA, "corpus.json"), encoding="utf-8") as f:
        pools = json.load(f)
    lines = make_lines(CORPUS_SEED, LINES, pools)
    texts = [line.decode("utf-8", "replace") for line in lines]
    training = [line.decode("utf-8", "replace") for line in make_lines(TRAIN_SEED, 6000, pools)]
    paths = {"sprout": "deploy/models/sprout/tokenizer.json"}
    for name, content in build_tokenizers(training).items():
        paths[name] = "tests/coordinator/tokenizer/data/%s.json" % name
        with open(os.path.join(ROOT, paths[name]), "w", encoding="utf-8") as f:
            json.dump(content, f, ensure_ascii=False, separators=(",", ":"))
    columns, golden = [], bytearray()
    for name, path in paths.items():
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            source = f.read()
        tokenizer = Tokenizer.from_str(source)
        bare = json.loads(source)
        bare["added_tokens"] = []
        bare["post_processor"] = None
        # Merging must not make an added token either.
        contents = {t["content"] for t in json.loads(source)["added_tokens"]}
        bare["model"]["merges"] = [m for m in bare["model"]["merges"] if (m if isinstance(m, str) else " ".join(m)).replace(" ", "") not in contents]
        modes = ["all", "decode"]
        if name in ("sprout", "qwen2", "gpt2"):
            modes += ["non_special", "none"]
        if name == "llama3":
            modes += ["template"]
        for mode in modes:
            columns.append({"tokenizer": name, "path": path, "mode": mode})
            if mode == "decode":
                random = Random(DECODE_SEED)
                for case in range(DECODE_CASES):
                    ids = [random.below(tokenizer.get_vocab_size() + 5) for _ in range(1 + random.below(40))]
                    golden += digest(tokenizer.decode(ids, skip_special_tokens=case % 2 == 1))
                continue
            used = Tokenizer.from_str(json.dumps(bare)) if mode == "none" else tokenizer
            used.encode_special_tokens = mode == "non_special"
            for text in texts:
                golden += digest(",".join(map(str, used.encode(text, add_special_tokens=mode == "template").ids)))
            used.encode_special_tokens = False
    with open(os.path.join(DATA, "golden.bin"), "wb") as f:
        f.write(golden)
    with open(os.path.join(DATA, "golden.json"), "w", encoding="utf-8") as f:
        json.dump({"tokenizers": tokenizers.__version__, "lines": LINES, "decode_cases": DECODE_CASES, "corpus_seed": CORPUS_SEED, "decode_seed": DECODE_SEED,
                   "corpus_sha256": hashlib.sha256(b"".join(lines)).hexdigest(), "columns": columns}, f, indent=1)


if __name__ == "__main__":
    main()
