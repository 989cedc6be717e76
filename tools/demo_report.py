"""Judges a run on the digits: a grid of samples, and how many are read as the digit that was asked for.

A support-vector classifier (scikit-learn's SVC, about 95 % on held-out real digits) reads the samples. The last line is
one JSON object that joins this to the run's own summary.

    python tools/demo_report.py runs/demo
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from vr_online.config import EvaluationConfig
from vr_online.data.codecs import codec_for
from vr_online.data.digits import load_splits
from vr_online.evaluation.generation import Sampler, decode_images, load_model
from vr_online.monitor.grid import image_grid, save_png

PER_ROW = 8


def generate(run: Path, per_class: int, steps: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """uint8 images (N, h, w, 1) by class, their labels (N,) and the names of the classes, from the averaged weights."""
    model, _, info, _, flow = load_model(run)
    labels = torch.arange(info.num_classes).repeat_interleave(per_class)
    settings = EvaluationConfig(solver="heun", steps=steps, batch_size=50, seed=10_000)
    with tqdm(total=len(labels), unit="sample", desc="sampling") as bar:
        parts = list(Sampler(model, flow, settings, info.norm, model.num_classes).batches(0, len(labels), labels, bar))
    return decode_images(codec_for(info), torch.cat(parts)), labels.numpy(), info.class_names


def class_accuracy(images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Share of the samples, and of the held-out real digits, that a classifier of real digits reads as their label."""
    from sklearn.svm import SVC

    splits = load_splits()
    train, y = splits["train"]
    real, real_y = splits["heldout"]
    classifier = SVC().fit(train.reshape(len(train), -1) / 255.0, y)
    return (
        float((classifier.predict(images.reshape(len(images), -1) / 255.0) == labels).mean()),
        float((classifier.predict(real.reshape(len(real), -1) / 255.0) == real_y).mean()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--steps", type=int, default=25, help="solver steps (Heun)")
    args = parser.parse_args()
    images, labels, names = generate(args.run, 10 if args.quick else 50, args.steps)
    accuracy, real = class_accuracy(images, labels)
    chosen = np.concatenate([np.flatnonzero(labels == c)[:PER_ROW] for c in range(len(names))])
    save_png(args.run / "samples.png", image_grid(images[chosen], PER_ROW, labels=names))
    result = {"class_accuracy": accuracy, "class_accuracy_real": real, "run_dir": str(args.run), "samples": len(images)}
    summary = args.run / "summary.json"
    if summary.exists():
        result = {**json.loads(summary.read_text()), **result}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
