#!/usr/bin/env bash
# Trains on the machines that Slurm gives. From the repository's folder, with the environment active:
#   sbatch --nodes 8 launch/slurm.sh --config RECIPE --config recipes/hardware/zero2.yaml
# Two minutes before its time is up, the run saves, ends, and is queued again; the same job goes on from there. See torchrun.sh for NPROC, RESTARTS, PYTHON.
#SBATCH --job-name=drafttrain
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export NODES=$SLURM_JOB_NUM_NODES JOB=$SLURM_JOB_ID RESTARTS=${RESTARTS:-3} GRACE=${GRACE:-100}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HEAD=${hosts%%$'\n'*}:$((29400 + SLURM_JOB_ID % 1000)) # jobs that share a machine meet at ports of their own

step= requeue=
trap 'requeue=yes; kill -TERM "$step" 2>/dev/null || true' USR1 # the time is nearly up
trap 'kill -TERM "$step" 2>/dev/null || true' TERM              # cancelled

srun --kill-on-bad-exit=1 launch/torchrun.sh "$@" &
step=$!
code=0; wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done # a signal ended the wait, not the step
[ -z "$requeue" ] || exec scontrol requeue "$SLURM_JOB_ID"
exit "$code"
