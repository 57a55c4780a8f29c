#!/usr/bin/env python3
"""Writes expected.inc: foldings of all code points as one hash, a tokenizer of awkward tokens, and the classes that the
tokenizers library itself gives them, and sprout's. Needs tokenizers.

    make_expected.py SPROUT_FOLDER > expected.inc
"""
import json
import sys

from tokenizers import Regex, Tokenizer, normalizers

fold = normalizers.Sequence(
    [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
ONLY_BLANK = "\ue000"
whole = normalizers.Sequence([
    normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
    normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), ONLY_BLANK), normalizers.Strip(),
    normalizers.Replace(ONLY_BLANK, " ")])


def fnv(values):
    h = 0xcbf29ce484222325
    for v in values:
        h = (h ^ v) * 0x100000001b3 & 0xFFFFFFFFFFFFFFFF
    return h


def classes(tokenizer):
    names, out = {}, []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else (whole.normalize_str(text) or text)
        out.append(names.setdefault(key, len(names)))
    return out, len(names)


def alphabet():
    """GPT-2's bytes to characters."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def stored(text):
    return "".join(alphabet()[b] for b in text.encode() if True)


texts = ["The", " the", "THE", "th\u00e9", "the\u0301", " ", "  ", "\n", "\t \r\n", "\u00a0", "\u3000", "\u2009x",
         "\uff21\uff22", "ab", "AB\n", " a  b ", "a\tb", "a b", "\ufb01", "fi", "\u212b", "\u00e5", "a", "\u0130",
         "i", "\u03a3", "\u03c2", "\u03c3", "\u1e9e", "\u00df", "ss", "\uac00", "\u1100\u1161", "\u4e2d", "\u0301",
         "\u0301\u0302", "\u00bd", "1\u20442", "\u2002\u0301", "\x0b", "\x0c\x1c", "\u2028", "\u200b", "\ufffd",
         "\ue000", "x\ue000", "\U0001d400", "\U0001f600", "\u0e33", "\u0345", "\u1fb3", "\u2126", "\u03c9", "\u01c4",
         "d\u017e", "\u0085", "\u180e", "\ufeff", "\u3099\u304b", "\u304c", "\u304b", "\u1f88"]
bytes_alone = [b"\xc3", b"\xe4\xb8", b"\xff", b"\xc3\xa9\xc3"]
pieces = list(dict.fromkeys(stored(t) for t in texts))
pieces += ["".join(alphabet()[b] for b in raw) for raw in bytes_alone]
added = ["<|END|>", "<|end|>", "\uff5cUser\uff5c", "|user|", "\u00e9", " THE ", "\u0120"]
added = [a for a in added if a not in pieces]
vocab = {piece: i for i, piece in enumerate(pieces)}
text = json.dumps({
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [dict(id=len(pieces) + i, content=a, single_word=False, lstrip=False, rstrip=False,
                          normalized=False, special=i % 2 == 0) for i, a in enumerate(added)],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
              "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
              "vocab": vocab, "merges": []}})
ids, count = classes(Tokenizer.from_str(text))

every = []
for code in range(0x110000):
    if not 0xD800 <= code < 0xE000:
        every += [code] + [ord(c) for c in fold.normalize_str(chr(code))]
sprout, sprout_count = classes(Tokenizer.from_file(sys.argv[1] + "/tokenizer.json"))
print("// Made by make_expected.py.")
print(f"constexpr uint64_t kFoldings = 0x{fnv(every):016x};")
print(f"constexpr int32_t kClasses = {count}, kSproutClasses = {sprout_count};")
print("constexpr int32_t kClassOf[] = {" + ", ".join(map(str, ids)) + "};")
print(f"constexpr size_t kSproutTokens = {len(sprout)};")
print(f"constexpr uint64_t kSproutHash = 0x{fnv(sprout):016x};")
print('constexpr const char* kTokenizer = R"json(' + text + ')json";')
