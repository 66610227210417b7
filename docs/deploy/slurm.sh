#!/bin/bash
# Forebay over two machines under Slurm: sbatch slurm.sh. The first machine is the head, each other one a node. It was not run on a Slurm.
#SBATCH --job-name=forebay
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=0
#SBATCH --time=7-00:00:00
set -euo pipefail

MODEL=${MODEL:-/srv/models/glm-5.3-int4}
STAGES=${STAGES:-40,38}
FOREBAY=${FOREBAY:-/opt/forebay/.venv/bin/forebay}
PORT=7000
export OMP_NUM_THREADS=1

# A key of this job alone, on a file system that all its machines see.
KEY=$(mktemp -p "${SLURM_SUBMIT_DIR:-.}" forebay-key.XXXXXX)
chmod 600 "$KEY"
openssl rand -hex 32 > "$KEY"
trap 'rm -f "$KEY"' EXIT

mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
NODES=()
STAGE=0
for HOST in "${HOSTS[@]:1}"; do
    NODES+=("$HOST:$PORT")
    # Started again when it ends: what systemd or Ray would do.
    srun --nodes=1 --ntasks=1 --nodelist="$HOST" --overlap bash -c \
        "while true; do $FOREBAY node $MODEL --listen 0.0.0.0:$PORT --stage $STAGE --stages $STAGES --key-file $KEY; sleep 1; done" &
    STAGE=$((STAGE + 1))
done

NODE_LIST=$(IFS=,; echo "${NODES[*]}")
srun --nodes=1 --ntasks=1 --nodelist="${HOSTS[0]}" --overlap \
    "$FOREBAY" serve "$MODEL" --nodes "$NODE_LIST" --stages "$STAGES" --key-file "$KEY" \
    --host 0.0.0.0 --port 8000 --sessions-dir "${SLURM_SUBMIT_DIR:-.}/sessions"
