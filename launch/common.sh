# shellcheck shell=bash
# Sourced by the scripts beside it: messages, errors, and running or only printing a command. They set `usage` first.

dry_run=false

refuse() { # reason
  printf 'error: %s\n%s\nSee launch/README.md\n' "$1" "${usage:?}" >&2
  exit 2
}

((BASH_VERSINFO[0] >= 5)) || refuse "bash 5 or newer is required, this is $BASH_VERSION (on macOS: brew install bash)"

say() {
  printf '%s\n' "$*" >&2
}

# Runs a command, or with --dry-run prints it, quoted for pasting into a shell.
act() {
  if "$dry_run"; then
    quote "$@"
  else
    "$@"
  fi
}

quote() { # words → one line of shell
  local word line=
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./:=,@+-]+$ ]]; then
      line+=" $word"
    else
      line+=" $(printf '%q' "$word")"
    fi
  done
  printf '%s\n' "${line:1}"
}

# .venv with the pinned requirements of a file.
prepare_environment() { # requirements file
  if "$dry_run"; then
    echo "# unless it exists (launch/environment.sh): python3 -m venv .venv && source .venv/bin/activate &&" \
      "python -m pip install --quiet --disable-pip-version-check -r $1"
  else
    source launch/environment.sh
    use_environment "$1"
  fi
}

# Whether the arguments contain --config=….
names_a_config() {
  local word
  for word in "$@"; do
    [[ $word == --config=?* ]] && return 0
  done
  return 1
}

# Whether the workdir is in a bucket, which requires requirements-gcs.txt.
in_bucket() {
  local word
  for word in "$@"; do
    [[ $word == --workdir=gs://* ]] && return 0
  done
  return 1
}

# Files of the repository that a run needs, packed for another machine.
pack_code() { # archive
  act tar --create --gzip --file "$1" --exclude=./.git --exclude=./.venv --exclude=./runs --exclude='__pycache__' \
    --exclude='./.*_cache' --exclude=./.hypothesis .
}
