#!/usr/bin/env bash
# One flat namespace: two headers that define a class of the same name would be merged by the linker into one of them.
# (kernels/cpu/vec_*.h are compiled once per instruction set, each in its own namespace.)
set -uo pipefail
cd "$(dirname "$0")/.."
twice=$(git ls-files 'kernels/*.h' 'worker/*.h' 'transport/*.h' 'coordinator/*.h' | grep -v 'kernels/cpu/vec_' |
  xargs grep -hE '^(class|struct|enum class) ' | grep -vE '^enum class [A-Za-z0-9_]+ : [a-z0-9_]+;' |
  grep -oE '^(class|struct|enum class) [A-Za-z0-9_]+ *(:|\{|final)' | awk '{gsub(/[:{]/, "", $0); print $NF == "final" ? $(NF-1) : $NF}' |
  sort | uniq -d)
[ -z "$twice" ] || { echo "defined in more than one header: $twice"; exit 1; }
