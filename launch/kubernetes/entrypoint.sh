#!/usr/bin/env bash
# The entry point of a pod. After SIGTERM main.py saves and exits with 0, which Kubernetes would take for a completed run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

stopped=false child=
trap 'stopped=true; [[ -n $child ]] && kill -TERM "$child"' TERM
python main.py "$@" &
child=$!
while true; do
  wait "$child"
  code=$?
  kill -0 "$child" 2>/dev/null || break # otherwise the signal interrupted the wait
done
if "$stopped"; then exit 143; fi
exit "$code"
