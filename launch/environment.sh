# shellcheck shell=bash
# Sourced by the scripts beside it: a virtual environment in .venv with pinned requirements, made once and kept up to date.

use_environment() { # requirements file
  local requirements=$1 stamp
  if [[ ! -x .venv/bin/python ]]; then
    local python
    python=$(command -v python3 || true)
    if [[ -z "$python" ]] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "error: Python 3.11 or newer is needed as python3; found ${python:-none}" >&2
      exit 2
    fi
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv .venv
  fi
  # shellcheck disable=SC1091 # made just now
  source .venv/bin/activate
  # The requirements file's own text is the stamp: an edited file is installed again, an unchanged one costs nothing.
  stamp=.venv/installed-$requirements
  if ! cmp -s "$requirements" "$stamp"; then
    echo "Installing $requirements (a minute or two, the first time)"
    python -m pip install --quiet --disable-pip-version-check -r "$requirements"
    cp "$requirements" "$stamp"
  fi
}
