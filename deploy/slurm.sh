#!/usr/bin/env bash
#SBATCH --job-name=headway
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# One run on all machines of a Slurm job:
#     sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh RECIPE.yaml run.dir=/shared/runs/one [a.b=c ...]
# Headway's environment is active on every machine. docs/several-machines.md says what has to be where.
set -euo pipefail
# A job's Ray answers only to those who know its token; ports that the system chose are open to all of the network.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}"
port=${RAY_PORT:-6379}
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on_first=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$first")
# Its own name may be 127.0.1.1 there, or an IPv6 address: then the first address of its cards.
address=$("${on_first[@]}" sh -c 'hostname -i; hostname -I' | tr ' ' '\n' | grep -vm1 -e '^127' -e : -e '^$'):$port ||
    { echo "error: $first has no IPv4 address beside 127.*, by hostname -i and hostname -I" >&2; exit 1; }

"${on_first[@]}" ray start --head --node-ip-address="${address%:*}" --port="$port" --block &
if ((SLURM_JOB_NUM_NODES > 1)); then
    others=$((SLURM_JOB_NUM_NODES - 1)) # --ntasks: the job's own count is one more, and one machine would start Ray twice
    # `ray start` gives up soon where the head is slow.
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="$first" \
        sh -c 'until ray start --address="$1" --block; do sleep 2; done' others "$address" &
fi
# The run itself waits 20 s for machines that it lacks, which may be too short.
"${on_first[@]}" timeout 300 python -c '
import sys, time
import ray
while True:
    try:
        ray.init(address=sys.argv[1], log_to_driver=False)
        break
    except (ConnectionError, RuntimeError):
        time.sleep(2)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(2)
' "$address" "$SLURM_JOB_NUM_NODES" || { echo "deploy/slurm.sh: of $SLURM_JOB_NUM_NODES machines not all joined Ray at $address within 300 s" >&2; exit 1; }

"${on_first[@]}" headway train "$@" cluster.address="$address" --restarts "${RESTARTS:-3}"
