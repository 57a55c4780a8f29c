#!/usr/bin/env python3
"""Writes nfc_tables.inc and class_tables.inc beside this file.

    pip install tokenizers && python3 make_tables.py      (Python 3.11: its unicodedata is Unicode 14.0)

Our yardstick is the Hugging Face `tokenizers` library, which carries several Unicode versions at once. So the library is
asked what it does with each code point, and Python's unicodedata supplies what it cannot be asked for:

* NFC: its normalization crate is Unicode 9.0. A combining class counts only where the library reorders by it.
* Regex classes: its Oniguruma is Unicode 16.0. PCRE2 10.42 is Unicode 14.0, so per general category the code points that
  Oniguruma has and 14.0 has not are written down, and the regex translator adds them to each \\p{..}.
* Scripts: whole range lists, because PCRE2's \\p{Han} means Script_Extensions.
* Digits pre-tokenizer: Rust's char::is_numeric, newer than both; the difference from \\p{N} is written down.
"""
import os
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

HERE = os.path.dirname(os.path.abspath(__file__))
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
CATEGORIES = ("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co").split()
SCRIPTS = ("Han Hiragana Katakana Hangul Bopomofo Latin Greek Cyrillic Arabic Hebrew Devanagari Thai").split()
assert unicodedata.unidata_version.startswith("14."), "the base of the class tables is Unicode 14.0: use Python 3.11"

nfd = normalizers.NFD().normalize_str
nfc = normalizers.NFC().normalize_str


def ranges(code_points):
    out = []
    for c in sorted(code_points):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def members(pattern):
    """The code points that the library's regex class matches."""
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    found = set()
    for i in range(0, len(CODE_POINTS), 4096):
        chunk = CODE_POINTS[i : i + 4096]
        kept = set()
        for text, _ in split.pre_tokenize_str("".join(map(chr, chunk))):
            kept.update(map(ord, text))
        found.update(c for c in chunk if c not in kept)
    return found


def write(name, lines):
    with open(os.path.join(HERE, name), "w") as f:
        f.write("// Made by make_tables.py (tokenizers %s, unicodedata %s). Do not edit.\n" %
                (tokenizers.__version__, unicodedata.unidata_version))
        f.write("// clang-format off\n")
        f.write("\n".join(lines) + "\n")
        f.write("// clang-format on\n")


def wrap(items, per_line):
    return ["    " + ", ".join(items[i : i + per_line]) + "," for i in range(0, len(items), per_line)]


def nfc_tables():
    hangul = range(0xAC00, 0xD7A4)
    ccc = {}
    for c in CODE_POINTS:
        k = unicodedata.combining(chr(c))
        if k == 0:
            continue
        # U+0334 has class 1 and U+0345 class 240: one of the two must move unless the library sees class 0.
        probes = ["a" + chr(c) + "\u0334", "a\u0345" + chr(c)]
        if any(nfd(p) == unicodedata.normalize("NFD", p) != p for p in probes) or c == 0x334 or k == 1:
            ccc[c] = k
    decomposition = {}
    for c in CODE_POINTS:
        if c not in hangul and nfd(chr(c)) != chr(c):
            decomposition[c] = [ord(x) for x in nfd(chr(c))]
    composition = []
    for c in decomposition:
        parts = unicodedata.decomposition(chr(c)).split()
        if len(parts) == 2 and not parts[0].startswith("<") and nfc("".join(chr(int(p, 16)) for p in parts)) == chr(c):
            composition.append((int(parts[0], 16), int(parts[1], 16), c))
    composition.sort()
    active = set(ccc) | {c for c in CODE_POINTS if nfc(chr(c)) != chr(c)} | {second for _, second, _ in composition}
    active |= set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))

    runs = []
    for c in sorted(ccc):
        if runs and runs[-1][1] == c - 1 and runs[-1][2] == ccc[c]:
            runs[-1][1] = c
        else:
            runs.append([c, c, ccc[c]])
    pool, index = [], []
    for c in sorted(decomposition):
        index.append((c, len(pool), len(decomposition[c])))
        pool += decomposition[c]
    lines = ["constexpr CombiningRange kCombiningRanges[] = {"]
    lines += wrap(["{0x%x, 0x%x, %d}" % tuple(r) for r in runs], 5) + ["};"]
    lines += ["constexpr Decomposition kDecompositions[] = {"]
    lines += wrap(["{0x%x, %d, %d}" % d for d in index], 6) + ["};"]
    lines += ["constexpr char32_t kDecompositionPool[] = {"] + wrap(["0x%x" % c for c in pool], 14) + ["};"]
    lines += ["constexpr Composition kCompositions[] = {"]
    lines += wrap(["{0x%x, 0x%x, 0x%x}" % c for c in composition], 5) + ["};"]
    lines += ["// Code points that NFC may change, move, or join to what stands before them."]
    lines += ["constexpr CodeRange kActiveRanges[] = {"]
    lines += wrap(["{0x%x, 0x%x}" % tuple(r) for r in ranges(active)], 6) + ["};"]
    write("nfc_tables.inc", lines)


def class_tables():
    lines, index = [], []

    def add(name, found):
        lines.append("constexpr CodeRange k%s[] = {" % name)
        lines.extend(wrap(["{0x%x, 0x%x}" % tuple(r) for r in ranges(found)], 6) + ["};"])

    lines.append("// Per general category: what Unicode 16.0 has and 14.0 has not.")
    for g in CATEGORIES:
        old = {c for c in CODE_POINTS if unicodedata.category(chr(c)) == g}
        new = members(r"\p{%s}" % g) - old
        if new:
            add("New" + g, new)
            index.append('{"%s", kNew%s}' % (g, g))
        else:
            index.append('{"%s", {}}' % g)
    lines += ["constexpr NamedRanges kNewByCategory[] = {"] + wrap(index, 6) + ["};"]
    lines.append("// Per script: all of it.")
    index = []
    for s in SCRIPTS:
        add("Script" + s, members(r"\p{%s}" % s))
        index.append('{"%s", kScript%s}' % (s.lower(), s))
    lines += ["constexpr NamedRanges kScripts[] = {"] + wrap(index, 4) + ["};"]
    words = members(r"\w")
    basic = set()
    for g in ("L", "M", "Nd", "Nl", "Pc"):
        basic |= members(r"\p{%s}" % g)
    assert basic <= words
    lines.append("// Oniguruma's \\w beyond L, M, Nd, Nl and Pc.")
    add("WordExtra", words - basic)
    split = pre_tokenizers.Digits(individual_digits=True)
    numeric = {c for c in CODE_POINTS if len(split.pre_tokenize_str("a" + chr(c) + "a")) == 3}
    numbers = members(r"\p{N}")
    assert numbers <= numeric
    lines.append("// Rust's char::is_numeric beyond Oniguruma's \\p{N}.")
    add("NumericExtra", numeric - numbers)
    write("class_tables.inc", lines)


nfc_tables()
class_tables()
