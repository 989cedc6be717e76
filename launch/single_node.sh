#!/usr/bin/env bash
# Every GPU of this machine.
#   launch/single_node.sh configs/imagenet256_xl.yaml [key.sub=value ...]
# GPUS=4 uses the first four. Run the same line again to continue.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,4p' "$0"; exit 2; }
config=$1; shift
[ -x .venv/bin/deepspeed ] && export PATH="$PWD/.venv/bin:$PATH"
exec deepspeed ${GPUS:+--num_gpus "$GPUS"} --module vr_online.train --config "$config" "$@"
