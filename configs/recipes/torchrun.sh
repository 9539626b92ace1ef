#!/usr/bin/env bash
# Eight nodes of eight GPUs without a scheduler: run this on every node, with the same variables.
# ACTORS=16 has that many Ray actors make each rank's batches, of the cluster that the node belongs to.
#   FIRST_NODE=10.0.0.1 DATASET=s3://bucket/train CHECKPOINTS=/shared/run ./torchrun.sh
set -euo pipefail
: "${FIRST_NODE:?address of the first node}" "${DATASET:?folder or URL of the dataset}"
: "${CHECKPOINTS:?folder on storage that all nodes share}"
exec torchrun \
  --nnodes "${NODES:-8}" --nproc-per-node "${GPUS:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "$FIRST_NODE:29500" --rdzv-id "${RUN:-fuelrail}" --max-restarts 3 \
  configs/trainers/fsdp2.py "$DATASET" --checkpoint "$CHECKPOINTS" --steps "${STEPS:-1000}" --every "${EVERY:-100}" \
  ${ACTORS:+--actors "$ACTORS"}
