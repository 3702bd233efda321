#!/usr/bin/env bash
# Creates .venv, installs the pinned requirements and trains the quick-start model.
# Arguments are passed to main.py, e.g. bash launch/quickstart.sh --config.train.steps=100
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
use_environment requirements.txt
exec python main.py --config=configs/quickstart.py "$@"
