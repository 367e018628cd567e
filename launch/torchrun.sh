#!/usr/bin/env bash
# Trains on all GPUs of this machine, or of several: then call it on each of them, with the same line.
#   launch/torchrun.sh --config RECIPE [--config recipes/hardware/zero2.yaml] [--section.key value] ...
#   NPROC=8                    processes on this machine; its GPUs if not set, and 1 where it has none
#   NODES=8 HEAD=host:29400    machines, and where they meet: a free port of any one of them
#   JOB=name                   tells jobs apart that meet at the same place
#   RESTARTS=3                 how often the job is started again, from its last checkpoint, when a process was lost or hung; 0 if not set
#   GRACE=120                  seconds that processes have to save and end behind TERM
#   PYTHON=exe                 the Python of the environment; python if not set
set -euo pipefail
gpus() { # CUDA_VISIBLE_DEVICES wins, even where it is empty
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
  else { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true; fi
}
nproc=${NPROC:-$(gpus)}
[ "$nproc" -ge 1 ] || nproc=1
place=(--standalone)
[ "${NODES:-1}" -le 1 ] || place=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "${HEAD:?HEAD=host:port says where $NODES machines meet}" --rdzv-id "${JOB:-drafttrain}")
# Processes that are started again would else read in the launcher's store where those before them were, and not meet (pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${GRACE:-120}
exec "${PYTHON:-python}" -m torch.distributed.run "${place[@]}" --nproc-per-node "$nproc" --max-restarts "${RESTARTS:-0}" -m drafttrain train "$@"
