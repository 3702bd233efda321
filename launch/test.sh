#!/usr/bin/env bash
# Lint, types and tests, as CI runs them. --full adds the slow tests. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
use_environment requirements-dev.txt

markers=(-m "not slow")
if [[ "${1:-}" == "--full" ]]; then
  markers=()
  shift
fi
ruff format --check .
ruff check .
pyrefly check
python -m pytest --numprocesses auto "${markers[@]}" "$@"
