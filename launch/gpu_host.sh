#!/usr/bin/env bash
# Trains on all GPUs of this host: creates .venv, installs the requirements, counts the GPUs, starts main.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="usage: launch/gpu_host.sh [--dry-run] --config=configs/… [arguments of main.py]"
# shellcheck source=launch/common.sh
source launch/common.sh

arguments=()
for word in "$@"; do
  if [[ $word == --dry-run ]]; then dry_run=true; else arguments+=("$word"); fi
done
names_a_config "${arguments[@]}" || refuse "--config=… is missing"
command -v nvidia-smi >/dev/null || refuse "nvidia-smi not found: this host has no NVIDIA driver"
gpus=$(nvidia-smi --list-gpus | wc -l)
[[ $gpus -gt 0 ]] || refuse "nvidia-smi lists no GPU"

prepare_environment requirements-gpu.txt
if in_bucket "${arguments[@]}"; then prepare_environment requirements-gcs.txt; fi
act exec python main.py --expect_devices="$gpus" "${arguments[@]}"
