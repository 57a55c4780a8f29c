#!/usr/bin/env bash
# clang-tidy 14 (.clang-tidy) over our .cc files and the headers they include, as many at a time as there are cores.
#   tests/check_tidy.sh BUILD [REVISION]
# BUILD is a built folder: its compile_commands.json says how, and generated headers must be there. With a REVISION only
# files that differ from it are checked, and for a header the .cc files that include it.
# Exits 1 on findings, 77 if clang-tidy is missing. The whole tree takes far longer than a build, so tests/run.sh checks
# nothing here; docs/testing.md says when to run it.
set -uo pipefail
[ -f "${1:-}/compile_commands.json" ] || { echo "usage: $0 BUILD [REVISION], BUILD with a compile_commands.json" >&2; exit 2; }
build=$(realpath "$1")
cd "$(dirname "$0")/.."
tool=$(command -v clang-tidy-14 || command -v clang-tidy) || { echo "clang-tidy is not installed"; exit 77; }
"$tool" --version | grep -q 'version 14\.' || { echo "clang-tidy 14 is wanted, this is another"; exit 77; }

if [ $# -gt 1 ]; then
  git rev-parse --verify --quiet "$2^{commit}" >/dev/null || { echo "no such revision: $2" >&2; exit 2; }
  files=$(git diff --name-only --diff-filter=d "$2" -- '*.cc')
  for header in $(git diff --name-only --diff-filter=d "$2" -- '*.h'); do
    files+=$'\n'$(git grep -lF "#include \"$header\"" -- '*.cc')
  done
else
  files=$(git ls-files '*.cc')
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Only what this build compiles: another machine's instruction set or an optional part has no command here. The commands
# may be GCC's: clang refuses its -fstack-reuse.
mapfile -t files < <(python3 - "$build" "$work" "$files" <<'EOF'
import json, os, sys
build, work, files = sys.argv[1:]
commands = json.load(open(f"{build}/compile_commands.json"))
for entry in commands:
    entry["command"] = entry["command"].replace("-fstack-reuse=none", "")
json.dump(commands, open(f"{work}/compile_commands.json", "w"))
built = {os.path.relpath(os.path.join(entry["directory"], entry["file"])) for entry in commands}
print("\n".join(sorted(built & set(files.split()))))
EOF
)
[ -n "${files[0]:-}" ] || { echo "no file to check"; exit 0; }

export tool work
tidy() {  # its findings, in one piece
  local out="$work/${1//\//_}"
  "$tool" --quiet -p "$work" --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument \
    "$1" >"$out" 2>"$out.err"
  local status=$?
  [ $status -eq 0 ] || cat "$out" <(grep -vE '^[0-9]+ warnings? |^Suppressed|^Use -' "$out.err")
  return $status
}
export -f tidy
if printf '%s\n' "${files[@]}" | xargs -P "$(nproc)" -I{} bash -c 'tidy {}' >"$work/all"; then
  echo "${#files[@]} files checked: no findings"
else
  # A header's finding comes once for each file that includes it.
  awk '/: (warning|error): /{show = !seen[$0]++} show' "$work/all"
  echo "$(grep -E ': (warning|error): ' "$work/all" | sort -u | wc -l) findings in ${#files[@]} files"
  exit 1
fi
