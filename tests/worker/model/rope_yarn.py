"""Rotary frequencies of every rope type that is read, by the published formulas in float64: the values of rope_test.cc.

    python3 tests/worker/model/rope_yarn.py > tests/worker/model/rope_values.inc
"""
import math

TWO_PI = 2 * math.pi
CASES = [
    # type, theta, dims, factor, original, beta_fast, beta_slow, truncate, attention_factor, mscale, mscale_all_dim
    ("kDefault", 1e4, 16, 1.0, 0, 32.0, 1.0, True, 0.0, 0.0, 0.0),
    ("kLinear", 1e4, 16, 4.0, 0, 32.0, 1.0, True, 0.0, 0.0, 0.0),
    ("kYarn", 1e6, 128, 4.0, 32768, 32.0, 1.0, True, 0.0, 0.0, 0.0),
    ("kYarn", 1e4, 64, 40.0, 4096, 32.0, 1.0, True, 0.0, 1.0, 1.0),
    ("kYarn", 1e4, 64, 40.0, 4096, 32.0, 1.0, True, 0.0, 1.0, 0.707),
    ("kYarn", 150000.0, 64, 32.0, 4096, 32.0, 1.0, False, 0.0, 0.0, 0.0),
    ("kYarn", 1e7, 64, 4.0, 262144, 16.0, 2.0, True, 1.25, 0.0, 0.0),
]


def yarn(theta, dims, factor, original, fast, slow, truncate):
    def dim_of(turns):
        return dims * math.log(original / (turns * TWO_PI)) / (2 * math.log(theta))

    low, high = dim_of(fast), dim_of(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    out = []
    for i in range(dims // 2):
        frequency = theta ** (-2 * i / dims)
        ramp = min(max((i - low) / (high - low), 0), 1)
        out.append(frequency / factor * ramp + frequency * (1 - ramp))
    return out


def attention(kind, factor, given, mscale, all_dim):
    def scale(weight):
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    if kind != "kYarn":
        return 1.0
    if given:
        return given
    if mscale and all_dim:
        return scale(mscale) / scale(all_dim)
    return scale(1)


def main():
    print("// Made by rope_yarn.py.")
    for kind, theta, dims, factor, original, fast, slow, truncate, given, mscale, all_dim in CASES:
        if kind == "kYarn":
            values = yarn(theta, dims, factor, original, fast, slow, truncate)
        else:
            values = [theta ** (-2 * i / dims) / factor for i in range(dims // 2)]
        print(f"{{{{.type = RopeType::{kind}, .theta = {theta!r}, .dims = {dims}, .factor = {factor!r},")
        print(f"  .original_max_positions = {original}, .beta_fast = {fast!r}, .beta_slow = {slow!r},")
        print(f"  .truncate = {str(truncate).lower()}, .attention_factor = {given!r}, .mscale = {mscale!r},")
        print(f"  .mscale_all_dim = {all_dim!r}}},")
        print(f" {attention(kind, factor, given, mscale, all_dim)!r},")
        lines, line = [], " {"
        for value in values:
            text = f"{value!r}, "
            if len(line) + len(text) > 118:
                lines.append(line.rstrip())
                line = "  "
            line += text
        lines.append(line.rstrip(", ") + "}},")
        print("\n".join(lines))


main()
