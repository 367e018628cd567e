#!/usr/bin/env bash
# From a recipe to a report: data_prep, train, export, validate. Each stage goes on where it stopped, so run this again after a stop.
#   launch/pipeline.sh RECIPE [--config recipes/hardware/zero2.yaml] [--section.key value] ...
#   NPROC=8      processes that train on this machine (torchrun); 1 if not set
#   PYTHON=exe   the Python of the environment; python if not set
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: $0 RECIPE [--config HARDWARE] [--section.key value] ..." >&2; exit 2; }
recipe=$1; shift
python=${PYTHON:-python}
if [ "${NPROC:-1}" -gt 1 ]; then
  train=("$python" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" -m drafttrain train)
else
  train=("$python" -m drafttrain train)
fi

echo "== data_prep"; "$python" -m data_prep --config "$recipe" "$@"
echo "== train";     "${train[@]}" --config "$recipe" "$@"
echo "== export";    "$python" -m drafttrain export --config "$recipe" "$@"
echo "== validate";  "$python" -m drafttrain validate --config "$recipe" "$@"
