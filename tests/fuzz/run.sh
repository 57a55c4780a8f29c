#!/usr/bin/env bash
# Builds the fuzz targets (clang; ASan, UBSan, libFuzzer) and runs each for a while on seeds made from the repository.
#   tests/fuzz/run.sh [SECONDS [TARGET...]]     60 seconds and all targets, unless told
# The build folder is build/fuzz, or $TENSORFOLD_BUILD_ROOT/fuzz. As many targets run at a time as there are cores.
# Exits 1 on a finding and names the input, which stays in the build folder; 77 if clang or its runtime is missing.
set -uo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-60}
[[ "$seconds" =~ ^[0-9]+$ ]] || { echo "usage: $0 [SECONDS [TARGET...]]" >&2; exit 2; }
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(grep -hoP '^tensorfold_fuzzer\(\K\w+' tests/fuzz/*/CMakeLists.txt | sort)
build=${TENSORFOLD_BUILD_ROOT:-build}/fuzz
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

command -v clang++ >/dev/null || { echo "clang is not installed"; exit 77; }
echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' >"$work/probe.cc"
clang++ -fsanitize=fuzzer,address,undefined "$work/probe.cc" -o "$work/probe" 2>/dev/null ||
  { echo "clang's sanitizer runtime is not installed (libclang-rt-*-dev)"; exit 77; }

if ! { cmake --preset fuzz -B "$build" && cmake --build "$build" --target "${targets[@]}"; } >"$work/build" 2>&1; then
  grep -E -A10 'error|FAILED' "$work/build" | head -n 60
  echo "the fuzz targets could not be built"
  exit 1
fi
python3 tests/fuzz/seeds.py "$work/seeds" || exit 1

fuzz() {  # fuzz TARGET: one line of what came out
  local target=$1 binary dict limits
  binary=$(find "$build/tests/fuzz" -type f -name "$target" | head -n 1)
  [ -n "$binary" ] || { echo "FAILED   $target: no such target"; return 1; }
  dict=$(find tests/fuzz -name "${target#fuzz_}.dict" | head -n 1)
  limits=(-max_total_time="$seconds" -timeout=25 -rss_limit_mb=2048 -print_final_stats=1)
  mkdir -p "$work/new/$target" "$work/seeds/$target" "$build/findings"
  if "$binary" "${limits[@]}" ${dict:+-dict="$dict"} -artifact_prefix="$build/findings/$target-" \
    "$work/new/$target" "$work/seeds/$target" >"$work/$target.log" 2>&1; then
    echo "ok       $target: $(grep -oP 'number_of_executed_units: \K\d+' "$work/$target.log") runs in $seconds s," \
      "$(ls "$work/seeds/$target" | wc -l) seeds, $(grep -oP 'cov: \K\d+' "$work/$target.log" | tail -n 1) edges, no finding"
  else
    grep -E -A25 'ERROR|runtime error|violated|SUMMARY' "$work/$target.log" | head -n 40 | sed 's/^/  | /'
    echo "FAILED   $target: $(grep -oP 'Test unit written to \K.*' "$work/$target.log" || echo 'no input written')"
    return 1
  fi
}
export -f fuzz
export build work seconds
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -c 'fuzz {}'
[ $? -eq 0 ] || exit 1
