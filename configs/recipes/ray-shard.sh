#!/usr/bin/env bash
# Shard on a Ray cluster; the same command continues a run that was cut off, and the bytes are the same on any cluster.
#   SOURCE=nuscenes:/data/drives OUT=/fast/out RAY_ADDRESS=http://head:8265 ./ray-shard.sh
set -euo pipefail
: "${SOURCE:?KIND:PATH of the source}" "${OUT:?folder of the dataset, on storage that all nodes share}"
exec ray job submit --address "${RAY_ADDRESS:?address of the cluster}" -- \
  fuelrail shard "$SOURCE" "$OUT" --engine ray --ray-address auto
