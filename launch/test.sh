#!/usr/bin/env bash
# Lint, types and tests, as CI runs them. --full adds the slow tests and what they need. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
use_environment requirements-dev.txt

markers=(-m "not slow")
# Tests mostly compile: without optimisations, and with the older code generators (5 min 14 s → 3 min 13 s).
export XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
if [[ "${1:-}" == "--full" ]]; then
  markers=()
  unset XLA_FLAGS # as users compile
  shift
  use_environment requirements-convert.txt # PyTorch, for checkpoints of the published code
  use_environment requirements-tpu.txt     # the TPU compiler, so that the train step is compiled for TPUs too
fi
ruff format --check .
ruff check .
pyrefly check
python -m pytest --numprocesses auto --dist loadgroup "${markers[@]}" "$@"
