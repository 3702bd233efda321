#!/usr/bin/env bash
# Lint, types and tests, as CI runs them. --full adds the slow tests, and PyTorch for those that need it. Other arguments
# go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
use_environment requirements-dev.txt

markers=(-m "not slow")
if [[ "${1:-}" == "--full" ]]; then
  use_environment requirements-convert.txt
  markers=()
  shift
fi
ruff format --check .
ruff check .
pyrefly check
python -m pytest --numprocesses auto "${markers[@]}" "$@"
