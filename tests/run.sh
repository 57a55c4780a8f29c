#!/usr/bin/env bash
# Installs, builds and runs all tests. The last line says what passed, failed and was skipped.
#   tests/run.sh           everything that CI runs
#   tests/run.sh --full    also the differential tester's whole product from cold states (hours on two cores)
# docs/testing.md says what each part protects and how to run one alone.
set -uo pipefail
cd "$(dirname "$0")/.."
full=0
[ "${1:-}" = "--full" ] && full=1

# A clone in another folder finds what an earlier one compiled.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1

passed=0
failed=0
skipped=0
log=$(mktemp -d)
step() {  # step NAME COMMAND...: runs, remembers, shows the end of the output of what failed
  local name=$1
  shift
  local start=$SECONDS
  "$@" >"$log/out" 2>&1 </dev/null
  local status=$?
  local took=$((SECONDS - start))
  case $status in
    0) passed=$((passed + 1)); echo "ok       $name (${took} s)" ;;
    77) skipped=$((skipped + 1)); echo "skipped  $name: $(tail -n 1 "$log/out")" ;;
    *) failed=$((failed + 1)); echo "FAILED   $name (${took} s)"; tail -n 60 "$log/out" | sed 's/^/  | /' ;;
  esac
  return $status
}
summary() {
  rm -rf "$log"
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$failed" -eq 0 ]
  exit
}

# GoogleTest binaries count test by test: every case is one passed, failed or skipped.
gtest_binary() {  # gtest_binary LABEL BINARY [ARGS...]
  local label=$1 binary=$2
  shift 2
  local start=$SECONDS
  timeout 1800 "$binary" "$@" >"$log/out" 2>&1 </dev/null
  local status=$?
  local ok bad skip
  ok=$(grep -cE '^\[       OK \]' "$log/out")
  bad=$(grep -cE '^\[  FAILED  \] [A-Za-z0-9_/]+\.[A-Za-z0-9_/]+ \(' "$log/out")
  skip=$(grep -cE '^\[  SKIPPED \] [A-Za-z0-9_/]+\.[A-Za-z0-9_/]+ \(' "$log/out")
  passed=$((passed + ok)) skipped=$((skipped + skip))
  if [ $status -ne 0 ]; then
    [ "$bad" -gt 0 ] || bad=1
    failed=$((failed + bad))
    echo "FAILED   $label: $ok passed, $bad failed, $skip skipped ($((SECONDS - start)) s)"
    tail -n 80 "$log/out" | sed 's/^/  | /'
  else
    echo "ok       $label: $ok passed, $skip skipped ($((SECONDS - start)) s)"
  fi
  grep -A3 -E '^\[ RUN' "$log/out" | grep -E 'Skipped$' -A1 | sed 's/^/  /' | head -5
}

deploy/install_deps.sh test || { echo "error: packages could not be installed"; failed=1; summary; }

echo "== build (release)"
step "configure release" cmake --preset release || summary
step "build release" cmake --build --preset release || summary

echo "== style"
step "clang-format" tests/check_format.sh
step "one class, one name" tests/check_names.sh
step "words that must not appear" tests/check_words.sh

echo "== tests (release)"
# GoogleTest binaries are counted test by test; scripts (exit code 77: skipped) are one test each.
ctest --test-dir build/release --show-only=json-v1 | python3 -c '
import json, shlex, sys
for test in json.load(sys.stdin)["tests"]:
    command = test.get("command", [])
    if command:
        print("gtest" if len(command) == 1 else "script", test["name"], shlex.join(command))' >"$log/tests"
[ -s "$log/tests" ] || { echo "error: no tests were built"; failed=$((failed + 1)); }
while read -r kind name command <&3; do
  if [ "$kind" = gtest ]; then gtest_binary "$name" "$command"; else step "$name" bash -c "$command"; fi
done 3<"$log/tests"

echo "== GPU kernels for the architectures that the release build leaves out (compiled, not run)"
compile_more() {
  command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || { echo "no nvcc"; return 77; }
  cmake -S . -B build/cuda-more -G Ninja -DCMAKE_BUILD_TYPE=Release -DTENSORFOLD_CUDA=ON -DTENSORFOLD_TESTS=OFF \
    "-DTENSORFOLD_CUDA_ARCHITECTURES=89;120" && cmake --build build/cuda-more --target tf_cuda
}
step "kernels/cuda for sm_89 and sm_120" compile_more

echo "== Arm (cross-built, under qemu)"
step "configure arm64-kernels" cmake --preset arm64-kernels &&
  step "build arm64-kernels" cmake --build --preset arm64-kernels &&
  step "kernels on NEON, against the golden hashes" qemu-aarch64 -L /usr/aarch64-linux-gnu build/arm64-kernels/tests/kernels/kernels_selftest

echo "== the program"
tensorfold=build/release/coordinator/commands/tensorfold
step "verify sprout (sample)" "$tensorfold" verify --model deploy/models/sprout --prompt-tokens 70 --worlds 1,2 --widths 2,8 --caches cold,prefix
step "verify --negative-control" "$tensorfold" verify --model tests/fixtures/qwen3 --negative-control
if [ "$full" -eq 1 ]; then
  for fixture in llama llama3_rope qwen3 qwen3_5 mlx_4bit; do
    step "verify --full $fixture" "$tensorfold" verify --full --caches cold --model "tests/fixtures/$fixture"
  done
fi

echo "== sanitizers"
# UCX's hooks of memory calls crash a program built with the thread sanitizer. The distribution's libraries are not
# instrumented: what they do under their own locks looks like races (spdlog's registry, gRPC).
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=ignore_noninstrumented_modules=1
for preset in asan tsan; do
  step "configure $preset" cmake --preset $preset || continue
  mapfile -t targets < <(tests/sanitizers.sh $preset)
  step "build $preset" cmake --build --preset $preset --target "${targets[@]}" || continue
  for target in "${targets[@]}"; do
    gtest_binary "$preset $target" env UCX_MEM_MMAP_HOOK_MODE=none "$(find build/$preset/tests -type f -name "$target" | head -n 1)"
  done
done

echo "== fuzzers (a few seconds each; tests/fuzz/run.sh runs them longer)"
step "fuzz" tests/fuzz/run.sh 5
summary
