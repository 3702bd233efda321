#!/usr/bin/env bash
# Trains on a Kubernetes cluster that has the JobSet controller: fills in a manifest of launch/kubernetes and applies it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="usage: launch/kubernetes.sh COMMAND --name=NAME [options] [-- --config=configs/… --workdir=… …]
  start    apply the JobSet; needs --image, --machine and the arguments of main.py after --
  logs     follow the first pod's log
  delete   delete the JobSet
options of start: --image=REGISTRY/adaptive_span_jax:TAG
                  --machine=tpu --accelerator=tpu-v5-lite-podslice --topology=2x4 --hosts=1 --chips=8 (a host)
                  --machine=gpu --hosts=2 --chips=8
all: --dry-run"
# shellcheck source=launch/common.sh
source launch/common.sh
shopt -u patsub_replacement 2>/dev/null || true # otherwise & would be special in the replacements below

command=${1:-} name='' image='' machine='' accelerator=tpu-v5-lite-podslice topology='' hosts='' chips='' arguments=()
[[ $# -gt 0 ]] && shift
while [[ $# -gt 0 ]]; do
  case $1 in
    --name=?*) name=${1#*=} ;;
    --image=?*) image=${1#*=} ;;
    --machine=?*) machine=${1#*=} ;;
    --accelerator=?*) accelerator=${1#*=} ;;
    --topology=?*) topology=${1#*=} ;;
    --hosts=?*) hosts=${1#*=} ;;
    --chips=?*) chips=${1#*=} ;;
    --dry-run) dry_run=true ;;
    --) shift && arguments=("$@") && break ;;
    *) refuse "unknown argument $1" ;;
  esac
  shift
done

# Only values that cannot be mistaken for YAML are inserted into a manifest.
must_match() { # option, value, pattern
  [[ $2 =~ ^$3$ ]] || refuse "$1 is missing or malformed: '$2'"
}

manifest() {
  local text json
  must_match --image "$image" '[A-Za-z0-9][A-Za-z0-9._/:@-]*'
  must_match --machine "$machine" '(tpu|gpu)'
  must_match --hosts "$hosts" '[1-9][0-9]*'
  must_match --chips "$chips" '[1-9][0-9]*'
  if [[ $machine == tpu ]]; then
    must_match --accelerator "$accelerator" '[a-z0-9-]+'
    must_match --topology "$topology" '[1-9][0-9]*(x[1-9][0-9]*)+'
  fi
  names_a_config "${arguments[@]}" || refuse "no --config=… after --"
  # A JSON list is a valid YAML list. Kubernetes would expand "$(" as a variable.
  # shellcheck disable=SC2016
  json=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]).replace("$(", "$$("))' \
    "--expect_devices=$((hosts * chips))" "${arguments[@]}")
  text=$(<"launch/kubernetes/$machine.yaml")
  text=${text//@NAME@/$name} text=${text//@IMAGE@/$image} text=${text//@HOSTS@/$hosts} text=${text//@CHIPS@/$chips}
  text=${text//@ACCELERATOR@/$accelerator} text=${text//@TOPOLOGY@/$topology} text=${text//@ARGUMENTS@/$json}
  printf '%s\n' "$text"
}

must_match --name "$name" '[a-z]([a-z0-9-]{0,40}[a-z0-9])?'
case $command in
  start)
    text=$(manifest)
    if "$dry_run"; then
      printf '%s\n' "# kubectl apply --filename=- with:" "$text"
    else
      kubectl apply --filename=- <<<"$text"
    fi
    ;;
  logs)
    first=batch.kubernetes.io/job-completion-index=0
    act kubectl logs --follow --selector="jobset.sigs.k8s.io/jobset-name=$name,$first"
    ;;
  delete) act kubectl delete jobset "$name" ;;
  '') refuse "no command" ;;
  *) refuse "unknown command $command" ;;
esac
