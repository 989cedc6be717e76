#!/usr/bin/env bash
# Several machines over ssh, listed in a hostfile of lines such as `node01 slots=8`.
#   launch/multi_node.sh HOSTFILE configs/imagenet256_xl.yaml [key.sub=value ...]
# All machines need this folder and the run directory at the same path (a shared file system), the same environment,
# ssh without a password, and pdsh on this one (apt-get install pdsh). Run the same line again to continue, also with another number of machines.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { sed -n '2,5p' "$0"; exit 2; }
hostfile=$1; config=$2; shift 2
[ -f "$hostfile" ] || { echo "$hostfile: no such hostfile; expected lines such as 'node01 slots=8'" >&2; exit 2; }
[ -x .venv/bin/deepspeed ] && export PATH="$PWD/.venv/bin:$PATH"
exec deepspeed --hostfile "$hostfile" --module vr_online.train --config "$config" "$@"
