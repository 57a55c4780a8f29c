#!/usr/bin/env bash
# Hours of mixed load on two ranks, in short or in full: tests/real/soak.sh [SECONDS] [more options of soak.py]
# 1800 seconds is the run that a release wants. What is checked: soak.py --help.
set -euo pipefail
cd "$(dirname "$0")"
exec nice -n 5 python3 soak.py --seconds "${1:-1800}" "${@:2}"
