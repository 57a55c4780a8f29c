#!/usr/bin/env python3
"""Writes folding_tables.inc: what NFKC, NFD, taking off accents and lower case make of each code point, as the Hugging
Face tokenizers library does it. Needs tokenizers.

The steps together are a map of single characters: NFKC then NFD is the compatibility decomposition, combining marks are
taken out, so their order does not matter, and lower case looks at one character. Hangul syllables, which decompose by a
rule, are left out of the table.

    make_folding.py > folding_tables.inc
"""
from tokenizers import normalizers

fold = normalizers.Sequence(
    [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
removed, single, several = [], [], []
for code in range(0x110000):
    if 0xD800 <= code < 0xE000 or 0xAC00 <= code <= 0xD7A3:
        continue
    text = fold.normalize_str(chr(code))
    if text == chr(code):
        continue
    if text == "":
        removed.append(code)
    elif len(text) == 1:
        single.append((code, ord(text) - code))
    else:
        several.append((code, text))


def runs(items, step_of):
    """[first, last, step] of codes that go up by 1 or by 2 and share what step_of says."""
    out = []
    for item in items:
        code, value = item if isinstance(item, tuple) else (item, None)
        if out and out[-1][3] == value and code - out[-1][1] in (1, 2):
            gap = code - out[-1][1]
            if out[-1][2] in (0, gap):
                out[-1][1], out[-1][2] = code, gap
                continue
        out.append([code, code, 0, value])
    return out


def lines(entries):
    text, line = "", ""
    for entry in entries:
        if len(line) + len(entry) > 116:
            text, line = text + "    " + line.rstrip() + "\n", ""
        line += entry + " "
    return text + "    " + line.rstrip() + "\n"


print("// Made by make_folding.py; the tables of the tokenizers library, Unicode 9.0 but for lower case and marks.")
print("constexpr FoldRun kRemoved[] = {")
print(lines(f"{{{a}, {b}, {max(step, 1)}, 0}}," for a, b, step, _ in runs(removed, None)), end="};\n")
print("constexpr FoldRun kMoved[] = {")
print(lines(f"{{{a}, {b}, {max(step, 1)}, {d}}}," for a, b, step, d in runs(single, None)), end="};\n")
print("// A character, then how many it becomes, then these.")
print("constexpr int32_t kSeveral[] = {")
print(lines(f"{c}, {len(t)}, {', '.join(str(ord(x)) for x in t)}," for c, t in several), end="};\n")
