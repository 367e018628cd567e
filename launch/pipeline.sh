#!/usr/bin/env bash
# From a recipe to a report: data_prep, train, export, validate. Each stage goes on where it stopped, so run this again after a stop.
#   launch/pipeline.sh RECIPE [--config recipes/hardware/zero2.yaml] [--section.key value] ...
#   NPROC=8      processes that train on this machine; 1 if not set. For more machines see torchrun.sh: NODES, HEAD, RESTARTS
#   PYTHON=exe   the Python of the environment; python if not set
# It ends at the first stage that fails, with its exit code. TERM is passed on, and no further stage begins after TERM or Ctrl-C.
# Where training alone was told to stop, it saved and exited 0: export then refuses, and this run again goes on with training.
set -uo pipefail
[ $# -ge 1 ] || { echo "usage: $0 RECIPE [--config HARDWARE] [--section.key value] ..." >&2; exit 2; }
recipe=$1; shift
python=${PYTHON:-python}
train=("$python" -m drafttrain train)
[ "${NPROC:-1}" -le 1 ] || train=("$(dirname "$0")/torchrun.sh")

child= stopped=0
trap 'stopped=143; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
trap 'stopped=130' INT # the terminal has told the stage already

stage() { # name, command ...: in the background, so that a signal is heard at once
  echo "== $1"; shift
  (trap - INT TERM; exec "$@") &
  child=$!
  wait "$child"; local code=$?
  while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done # a signal ended the wait, not the stage
  [ "$stopped" -eq 0 ] || exit "$stopped"
  [ "$code" -eq 0 ] || exit "$code"
}

stage data_prep "$python" -m data_prep --config "$recipe" "$@"
stage train "${train[@]}" --config "$recipe" "$@"
stage export "$python" -m drafttrain export --finished --config "$recipe" "$@"
stage validate "$python" -m drafttrain validate --config "$recipe" "$@"
