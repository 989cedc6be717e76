#!/usr/bin/env bash
# The main job, small: sets everything up, writes latent shards of scikit-learn's handwritten digits, trains a
# class-conditional SiT on them with the deepspeed launcher, evaluates it, and shows samples and figures.
#   ./launch/demo.sh [key.sub=value ...]      such as train.steps=200 name=short
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup.sh
setup demo

ranks=$(processes)
# One thread a process keeps two ranks from fighting over two cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} DS_ACCELERATOR=${DS_ACCELERATOR:-$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}
run=$(python - "$@" <<'PY'
import sys
from vr_online.config import load_config
print(load_config("configs/demo.yaml", sys.argv[1:]).directory)
PY
)
echo "1/4  writing latent shards to data/digits"
[ -f data/digits/heldout/dataset.json ] || vr-online shards digits --out data/digits

echo "2/4  training on $ranks processes into $run (again the same command continues it)"
deepspeed --num_gpus "$ranks" --log_level error --module vr_online.train --config configs/demo.yaml "$@"

echo "3/4  drawing figures"
vr-online plot "$run"

echo "4/4  sampling, and reading the samples with a classifier of real digits"
report=$(python tools/demo_report.py "$run" | tail -n 1)

cat <<TEXT

samples      $run/samples.png        (10 classes x 8, from the averaged weights)
figures      $run/figures/
evaluations  $run/evals/
TensorBoard  .venv/bin/tensorboard --logdir $run/tensorboard    then open http://localhost:6006

$report
TEXT
