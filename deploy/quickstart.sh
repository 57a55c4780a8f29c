#!/usr/bin/env bash
# From a fresh clone to a two-rank cluster that answers: installs packages, builds, starts rank 1 and then rank 0 of
# deploy/profiles/demo-2rank.yaml on this machine, asks one question with drafts and once without, and compares the bytes.
#   deploy/quickstart.sh          leaves the cluster up
#   deploy/quickstart.sh --once   stops it again
set -euo pipefail
cd "$(dirname "$0")/.."

once=0
case "${1:-}" in
  "") ;;
  --once) once=1 ;;
  *) echo "usage: $0 [--once]" >&2; exit 2 ;;
esac

deploy/install_deps.sh build
echo "== building (a few minutes the first time)"
cmake --preset release -DTENSORFOLD_TESTS=OFF -B build/quickstart >build-quickstart.log 2>&1 || { tail -20 build-quickstart.log; exit 1; }
cmake --build build/quickstart --target tensorfold >>build-quickstart.log 2>&1 || { tail -40 build-quickstart.log; exit 1; }
rm -f build-quickstart.log
tensorfold=build/quickstart/coordinator/commands/tensorfold
profile=deploy/profiles/demo-2rank.yaml
logs=$(mktemp -d)

pids=()
stop() {
  [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
}
fail() {
  echo "error: $1; the logs say:" >&2
  tail -n 15 "$logs"/rank*.log >&2
  stop
  exit 1
}

echo "== starting rank 1, then rank 0"
"$tensorfold" serve --profile "$profile" --rank 1 >"$logs/rank1.log" 2>&1 &
pids+=($!)
"$tensorfold" serve --profile "$profile" --rank 0 >"$logs/rank0.log" 2>&1 &
pids+=($!)
[ "$once" -eq 0 ] || trap stop EXIT

ready=0
for _ in $(seq 1 300); do
  for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null || fail "a rank ended"; done
  if curl -sf http://127.0.0.1:8000/ready >/dev/null; then ready=1; break; fi
  sleep 0.2
done
[ "$ready" -eq 1 ] || fail "the cluster was not ready within 60 s"

echo "== one question, drafted and serial"
status=0
python3 deploy/quickstart_compare.py http://127.0.0.1:8000 || status=$?
if [ "$status" -ne 0 ]; then fail "the drafted and the serial reply differ, or a request failed"; fi

if [ "$once" -eq 1 ]; then
  echo "== stopping (without --once the cluster stays up)"
  exit 0
fi
disown -a
cat <<EOF

The cluster is up (pids ${pids[*]}; logs in $logs). Try:

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is a telescope?"}]}'

  curl http://127.0.0.1:8000/ready
  curl http://127.0.0.1:8000/metrics

Stop it with: kill ${pids[*]}
EOF
