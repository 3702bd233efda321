# shellcheck shell=bash
# Sourced by the scripts beside it: a virtual environment in .venv with pinned requirements, created once and kept up to date.

use_environment() { # requirements file
  local requirements=$1 stamp
  if [[ ! -x .venv/bin/python ]]; then
    local python
    python=$(command -v python3 || true)
    if [[ -z "$python" ]] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "error: python3 must be Python 3.11 or newer; found ${python:-none}" >&2
      exit 2
    fi
    echo "Creating .venv with $("$python" --version)"
    "$python" -m venv .venv
  fi
  # shellcheck disable=SC1091 # created above
  source .venv/bin/activate
  # A copy of the requirements file is the stamp: a changed file is installed again, an unchanged one is skipped.
  stamp=.venv/installed-$requirements
  if ! cmp -s "$requirements" "$stamp"; then
    echo "Installing $requirements (a minute or two, the first time)"
    python -m pip install --quiet --disable-pip-version-check -r "$requirements"
    cp "$requirements" "$stamp"
  fi
}
