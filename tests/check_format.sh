#!/usr/bin/env bash
# Every C++ file is as clang-format 14 writes it (later releases differ in details, so only 14 is asked).
set -uo pipefail
cd "$(dirname "$0")/.."
tool=$(command -v clang-format-14 || command -v clang-format) || { echo "clang-format is not installed"; exit 77; }
"$tool" --version | grep -q ' 14\.' || { echo "clang-format 14 is wanted, this is $("$tool" --version)"; exit 77; }
git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs "$tool" --dry-run --Werror
