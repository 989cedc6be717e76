"""Train a latent flow model.

    deepspeed --num_gpus 8 --module vr_online.train --config configs/imagenet256_xl.yaml
    vr-online train --config configs/demo.yaml train.steps=100 optimizer.lr=2e-4

Any key of the configuration can be given as key.sub=value after the options. Run the same command again to continue
from the newest whole checkpoint. `--dry-run` prints the resolved configuration and what the run will take.

SIGTERM, SIGINT or SIGUSR1 make all ranks write a checkpoint at the same step and end with status 75 (not finished).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback

import torch
import torch.distributed as dist
from tqdm import tqdm

from vr_online.config import Config, dump, load_config
from vr_online.errors import UserError
from vr_online.evaluation.generation import preview
from vr_online.evaluation.jobs import Evaluator
from vr_online.models.sit import drop_labels, forward_macs
from vr_online.files import write_atomic
from vr_online.monitor.grid import save_png
from vr_online.monitor.speed import device_peak_tflops, memory_metrics, mfu
from vr_online.plan import describe
from vr_online.ranks import Ranks
from vr_online.run import Run, keyed_generator, open_data, start

STOP_EVERY = 10  # steps between two looks at whether a rank was told to stop
STOPPED = 75  # exit status of a run that was told to stop: EX_TEMPFAIL, try again later


def train_step(run: Run) -> None:
    """One optimizer step over the global batch. Nothing in it waits for the device."""
    engine, plan, sampler = run.engine, run.plan, run.sampler
    images = run.images + plan.batch_size
    for group in run.optimizer.param_groups:
        group["lr"] = run.schedule(images)

    for micro in range(plan.accumulation):
        with run.timer.wait():
            batch = next(run.batches)
        x_1 = run.norm.normalize(batch.latent)
        generator = keyed_generator(run.device, run.config.seed, run.step, micro, run.ranks.rank)
        x_0 = torch.randn(x_1.shape, generator=generator, device=run.device)
        y = drop_labels(batch.y, run.config.model.label_drop, run.num_classes, generator)

        draw = sampler.draw(len(x_1))
        x_t, target = run.flow.sample(x_1, x_0, draw.t)
        losses = run.flow.loss(engine(x_t, draw.t, y), target)
        engine.backward((draw.weight * losses).mean())
        sampler.update(draw, losses.detach())
        run.totals.add_loss(draw.weight * losses.detach())
        run.optimizer.found_inf = None
        engine.step()  # moves the weights at the last micro-batch

    # None: the engine itself saw a non-finite gradient and never called the optimizer.
    skipped = run.optimizer.found_inf if run.optimizer.found_inf is not None else torch.ones((), device=run.device)
    sampler.commit(skipped)
    run.ema.update(images, skipped)
    run.totals.add_step(skipped)
    run.timer.step()
    run.step += 1


def train(config: Config, ranks: Ranks) -> dict:
    """Runs the whole configuration, or until told to stop.

    Returns:
        `steps`, `images`, the last logged `loss`, `run_dir`, and the metrics of the last evaluation.
    """
    run = start(config, ranks)
    evaluator = run.extra["evaluator"] = Evaluator(config, run.info, ranks, run.monitor)
    stop, last = StopSignal(), run.monitor.last_line() if run.step == run.total_steps else {}
    bar = tqdm(total=run.total_steps, initial=run.step, unit="step", disable=not ranks.is_main, dynamic_ncols=True)
    try:
        if run.step and evaluator.missed(run.step):
            evaluator.evaluate(run, should_stop=lambda: stop.agree_now(run))
        while run.step < run.total_steps and not stop.agreed:
            train_step(run)
            bar.update()
            finished = run.step == run.total_steps
            if finished or run.step % config.monitor.log_every == 0:
                last = log(run, bar)
            with run.timer.pause():
                stop.agree(run)
                after_step(run, evaluator, stop)
        if ranks.is_main:
            tqdm.write(run.sampler.verdict())
        evaluator.finish(wait=False if stop.agreed else None)
    finally:
        bar.close()
        run.monitor.close()
        run.stream.close()
    if run.step < run.total_steps and ranks.is_main:
        tqdm.write(f"told to stop: the checkpoint of step {run.step} is written; run the same command to continue")
    return {"steps": run.step, "images": run.images, "loss": last.get("train/loss"), "run_dir": str(run.directory), **evaluator.summary()}


def after_step(run: Run, evaluator: Evaluator, stop: "StopSignal") -> None:
    """What is due after a step: a checkpoint, a grid of samples, an evaluation. All ranks call it.

    A run that is told to stop writes the checkpoint only; continued, it makes up for the evaluation.
    """
    config, finished = run.config, run.step == run.total_steps
    evaluate = evaluator.due(run.step) or (finished and evaluator.enabled)
    if finished or stop.agreed or evaluate or run.step % config.checkpoint.every == 0:
        run.monitor.flush()
        run.save()
    if stop.agreed:
        return
    if config.monitor.samples_every and (finished or run.step % config.monitor.samples_every == 0):
        show_samples(run)
    if evaluate:
        evaluator.evaluate(run, should_stop=lambda: stop.agree_now(run))
    evaluator.poll()


def log(run: Run, bar: tqdm) -> dict:
    """Writes one line of metrics; the only place that waits for the device. All ranks call it."""
    taken = run.totals.take_loss()
    if run.ranks.world_size > 1:
        dist.all_reduce(taken)
    total, counted = taken.tolist()
    values = {
        "train/loss": total / counted if counted else float("nan"),
        "train/grad_norm": float(run.optimizer.grad_norm) if run.optimizer.grad_norm is not None else float("nan"),
        "train/lr": run.optimizer.param_groups[0]["lr"],
        "train/skipped_steps": float(run.totals.skipped),
        "train/epoch": run.images / run.info.samples,
        **run.timer.summary(),
        **memory_metrics(run.device),
    }
    peak = run.config.monitor.peak_tflops or device_peak_tflops(run.device, run.config.engine.precision)
    if peak and "speed/images_per_s" in values:
        macs = forward_macs(run.config.model, run.info.latent_shape)
        values["speed/mfu"] = mfu(macs, values["speed/images_per_s"], run.ranks.world_size, peak)
    values.update({f"sampler/{name}": value for name, value in run.sampler.metrics().items()})
    snapshot = run.sampler.snapshot()
    run.monitor.log(run.step, values, snapshot, images=run.images)
    bar.set_postfix(loss=f"{values['train/loss']:.4f}", img_s=f"{values.get('speed/images_per_s', 0):.0f}", refresh=False)
    _stop_if_diverged(run, snapshot)
    return values


def _stop_if_diverged(run: Run, snapshot: dict) -> None:
    in_a_row = int(run.totals.in_a_row)
    if in_a_row < run.config.train.max_skipped:
        return
    bad = [b for b, count in enumerate(snapshot.get("nonfinite", [])) if count]
    where = f"; non-finite losses so far fell into bins {bad} of {len(snapshot['p'])}" if bad else ""
    raise UserError(
        f"step {run.step}: the loss or gradient was not finite for the last {in_a_row} steps in a row{where}. The weights are "
        f"those of the last good step. Lower optimizer.lr or train.clip, or look at the data; checkpoints in {run.directory}"
    )


def show_samples(run: Run) -> None:
    """A grid of samples from the averaged weights, to TensorBoard and `samples/<step>.png`. All ranks call it."""
    model = run.average_model()
    if run.ranks.is_main:
        grid = preview(model, run.flow, run.info, run.config.monitor, run.config.evaluation.codec_path)
        run.monitor.images(run.step, "samples", grid)
        try:
            save_png(run.directory / "samples" / f"{run.step}.png", grid)
        except UserError as error:
            tqdm.write(f"the grid of step {run.step} is not on disk ({error}); training goes on")


class StopSignal:
    """Whether the run was asked to end, on any rank. A second SIGINT ends this process at once.

    Attributes:
        agreed: all ranks know, and stop after the same step.
    """

    def __init__(self):
        self._requested = self.agreed = False
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            signal.signal(getattr(signal, name), self._request)

    def _request(self, number, _frame) -> None:
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True

    def agree(self, run: Run) -> None:
        """Exchanges the flag now and then; waits for the other hosts, not for devices. All ranks call it."""
        if run.step % STOP_EVERY == 0:
            self.agree_now(run)

    def agree_now(self, run: Run) -> bool:
        """Exchanges the flag; what it returns is the same on all ranks, which all call it."""
        self.agreed = run.ranks.any(self._requested)
        return self.agreed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="YAML of the run (see configs/)")
    parser.add_argument("--init", metavar="WEIGHTS", help="same as model.init=WEIGHTS")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the plan, then end")
    parser.add_argument("--world-size", type=int, default=None, help="ranks to plan for with --dry-run (default: those launched)")
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)  # the launcher passes it
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override any key of the configuration")


def run(args: argparse.Namespace) -> int:
    overrides = list(args.overrides) + ([f"model.init={json.dumps(args.init)}"] if args.init else [])
    config = load_config(args.config, overrides)
    if args.dry_run:
        return _dry_run(config, args.world_size)
    describe(config, open_data(config), int(os.environ.get("WORLD_SIZE", 1)))  # refuses what cannot run, before any device work
    ranks = Ranks()
    try:
        summary = train(config, ranks)
    except BaseException as error:  # every way out must end the other ranks too
        return _failed(ranks, error)
    if ranks.is_main:
        write_atomic(config.directory / "summary.json", json.dumps(summary))
        print(json.dumps(summary), flush=True)
    ranks.close()
    return 0 if summary["steps"] == config.train.total_steps else STOPPED


def _failed(ranks: Ranks, error: BaseException) -> int:
    if isinstance(error, UserError):
        message = str(error)
    else:
        elsewhere = ranks.failure_elsewhere()
        if elsewhere:
            print(f"[rank {ranks.rank}] stopped because another rank failed: {elsewhere}", file=sys.stderr, flush=True)
            return 1
        traceback.print_exception(error)
        message = f"{type(error).__name__}: {error}"
    print(f"[rank {ranks.rank}] error: {message}", file=sys.stderr, flush=True)
    ranks.fail(message)
    return 2 if isinstance(error, UserError) else 1


def _dry_run(config: Config, world_size: int | None) -> int:
    if int(os.environ.get("RANK", 0)) == 0:
        plan = describe(config, open_data(config), world_size or int(os.environ.get("WORLD_SIZE", 1)))
        print(dump(config))
        print("\n".join(f"{name + ':':10}{value}" for name, value in plan.items()))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="vr_online.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
