#!/usr/bin/env bash
# From nothing to a trained model: makes .venv, installs the pinned requirements, trains the quickstart.
# Arguments are passed on to main.py, e.g. bash launch/quickstart.sh --config.train.steps=100
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
use_environment requirements.txt
exec python main.py --config=configs/quickstart.py "$@"
