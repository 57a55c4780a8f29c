#!/usr/bin/env bash
# Which test binaries run under which sanitizer in tests/run.sh, one "PRESET TARGET" a line.
cat <<'EOF'
asan safetensors_test
tsan local_test
EOF
