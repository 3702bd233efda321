#!/usr/bin/env bash
# Trains on a Cloud TPU slice: requests it, installs on all workers, starts training, follows the log, restarts after a preemption.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="usage: launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE [options] [-- --config=configs/… --workdir=… …]
  run      create, install, start and logs, again after each preemption, until the run is complete
  create   request the slice and wait for it
  install  copy this code to all workers and install requirements-tpu.txt
  start    start main.py on all workers with the arguments after --
  logs     follow the first worker's log until training ends; exits with its exit code
  delete   delete the slice
options: --type=v5litepod-8  --version=v2-alpha-tpuv5-lite  --project=PROJECT  --spot  --dry-run"
# shellcheck source=launch/common.sh
source launch/common.sh

command=${1:-} name='' zone='' type=v5litepod-8 version=v2-alpha-tpuv5-lite project='' spot=false arguments=()
[[ $# -gt 0 ]] && shift
while [[ $# -gt 0 ]]; do
  case $1 in
    --name=?*) name=${1#*=} ;;
    --zone=?*) zone=${1#*=} ;;
    --type=?*) type=${1#*=} ;;
    --version=?*) version=${1#*=} ;;
    --project=?*) project=${1#*=} ;;
    --spot) spot=true ;;
    --dry-run) dry_run=true ;;
    --) shift && arguments=("$@") && break ;;
    *) refuse "unknown argument $1" ;;
  esac
  shift
done
case $command in
  run | create | install | start | logs | delete) ;;
  '') refuse "no command" ;;
  *) refuse "unknown command $command" ;;
esac
[[ -n $name ]] || refuse "--name is missing"
[[ -n $zone ]] || refuse "--zone is missing"
if [[ $command == run || $command == start ]]; then
  names_a_config "${arguments[@]}" || refuse "no --config=… after --"
fi
if [[ $command == run && $spot == true && ! " ${arguments[*]}" =~ \ --workdir=(gs://|/) ]]; then
  refuse "a --spot slice loses its disk when preempted: add --workdir=gs://… or a mounted folder after --"
fi

where=(--zone="$zone")
[[ -n $project ]] && where+=(--project="$project")

# The state of the request: ACTIVE, WAITING_FOR_RESOURCES, PROVISIONING, SUSPENDED, FAILED, …, or NONE.
state() {
  gcloud compute tpus queued-resources describe "$name" "${where[@]}" --format='value(state.state)' 2>/dev/null ||
    echo NONE
}

on_workers() { # workers, shell command
  act gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$1" --command="$2"
}

create() {
  local found=NONE options=()
  "$spot" && options+=(--spot)
  "$dry_run" || found=$(state)
  if [[ $found == NONE ]]; then
    act gcloud compute tpus queued-resources create "$name" "${where[@]}" --node-id="$name" --accelerator-type="$type" \
      --runtime-version="$version" "${options[@]}" || exit
  fi
  if "$dry_run"; then
    echo "# until its state is ACTIVE, every 30 s:"
    quote gcloud compute tpus queued-resources describe "$name" "${where[@]}" --format='value(state.state)'
    return
  fi
  until found=$(state) && [[ $found == ACTIVE ]]; do
    say "$(date +%H:%M:%S) $name is $found"
    case $found in
      SUSPENDING | SUSPENDED) return 1 ;; # preempted
      FAILED | NONE)
        say "See gcloud compute tpus queued-resources describe $name ${where[*]}"
        exit 1
        ;;
    esac
    sleep "${POLL_SECONDS:-30}"
  done
}

# The runtimes' Python is older than 3.11, so uv installs one.
install() {
  local archive=${TMPDIR:-/tmp}/adaptive_span_jax.$$.tar.gz
  pack_code "$archive" &&
    act gcloud compute tpus tpu-vm scp "$archive" "$name:adaptive_span_jax.tar.gz" "${where[@]}" --worker=all &&
    act rm -f "$archive" &&
    on_workers all 'set -e
      mkdir -p adaptive_span_jax
      tar -xzf adaptive_span_jax.tar.gz -C adaptive_span_jax
      cd adaptive_span_jax
      if [ ! -x .venv/bin/python ]; then
        python3 -m pip install --quiet --user uv
        python3 -m uv venv --quiet --python 3.11 --seed .venv
      fi
      source launch/environment.sh
      use_environment requirements-tpu.txt'
}

# Detached from the connection, so that training survives its loss. A second start does not affect a running one.
start() {
  local line
  line=$(quote .venv/bin/python main.py "${arguments[@]}")
  on_workers all "cd adaptive_span_jax || exit
      if [ -f train.pid ] && kill -0 \"\$(cat train.pid)\" 2>/dev/null; then
        echo 'already running'
        exit
      fi
      rm -f train.code
      nohup bash -c $(printf '%q' "$line; echo \$? >train.code") >>train.log 2>&1 </dev/null &
      echo \$! >train.pid"
}

# Exits with 255, as for a lost connection, if training was killed.
logs() {
  # shellcheck disable=SC2016
  on_workers 0 'cd adaptive_span_jax || exit
      tail -n 50 --pid="$(cat train.pid)" -f train.log
      exit "$(cat train.code || echo 255)"'
}

delete() {
  act gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

run() {
  local code failures=0 began
  while true; do
    create || { delete && continue; }
    code=0 began=$SECONDS
    { install && start && logs; } || code=$?
    if "$dry_run"; then
      echo "# if the slice is then no longer ACTIVE: delete it and repeat all of this"
      quote gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
      return
    fi
    if [[ $(state) != ACTIVE ]]; then
      say "The slice was preempted; requesting another. Training will resume from its newest checkpoint."
      delete
    elif [[ $code != 255 ]]; then # the exit code of training
      say "Training ended with code $code. To stop paying: launch/tpu_vm.sh delete --name=$name ${where[*]}"
      return "$code"
    else
      ((SECONDS - began > 600)) && failures=0
      ((++failures < 10)) || return "$code"
      say "The connection failed; trying again."
      sleep "${POLL_SECONDS:-30}"
    fi
  done
}

"$command"
