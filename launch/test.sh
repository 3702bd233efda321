#!/usr/bin/env bash
# Lint, types, docs and tests, as in CI. --full adds the slow tests and their requirements. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
use_environment requirements-dev.txt

markers=(-m "not slow")
# Tests spend most of their time compiling, so they compile without optimizations.
export XLA_FLAGS="--xla_backend_optimization_level=0"
# The older code generators of XLA:CPU compile faster (5 min 14 s → 3 min 13 s). JAX 0.11 removed them, and XLA aborts on an
# unknown flag.
if python -c 'import sys, jaxlib.version as v; sys.exit(v.__version_info__ >= (0, 11))'; then
  XLA_FLAGS+=" --xla_cpu_use_fusion_emitters=false"
fi
if [[ "${1:-}" == "--full" ]]; then
  markers=()
  unset XLA_FLAGS # as users compile
  shift
  use_environment requirements-convert.txt # PyTorch, for checkpoints of the published code
  use_environment requirements-tpu.txt     # the TPU compiler, so that the train step is compiled for TPUs too
fi

# The report's page is tested in a browser. Only CI installs one; elsewhere these tests are skipped if there is none.
browsers=(chromium-headless-shell chromium chromium-browser google-chrome)
if [[ "${CI:-}" == true && $EUID == 0 ]] && command -v apt-get >/dev/null && ! command -v "${browsers[@]}" >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt=(apt-get -qq -o DPkg::Lock::Timeout=300)
  { "${apt[@]}" update && "${apt[@]}" install --yes --no-install-recommends chromium-headless-shell >/dev/null; } ||
    echo "Chromium could not be installed: tests of the report's page will be skipped" >&2
fi

ruff format --check .
ruff check .
lint-imports --no-cache
pyrefly check
if [[ -f mkdocs.yml ]]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet --site-dir "$site"
fi
python -m pytest --numprocesses auto --dist loadgroup "${markers[@]}" "$@"
