#!/usr/bin/env bash
# What a pod runs. After SIGTERM main.py saves and ends with 0; to Kubernetes that would mean that training is complete.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

stopped=false child=
trap 'stopped=true; [[ -n $child ]] && kill -TERM "$child"' TERM
python main.py "$@" &
child=$!
while true; do
  wait "$child"
  code=$?
  kill -0 "$child" 2>/dev/null || break # else it was the signal that ended the waiting
done
if "$stopped"; then exit 143; fi
exit "$code"
