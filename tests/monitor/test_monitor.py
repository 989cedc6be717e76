import json
import math
import os
import warnings

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from vr_online.config import load_config, validate
from vr_online.errors import UserError
from vr_online.monitor import Monitor, names, records
from vr_online.monitor.records import append_record, read_records, truncate_records

pytestmark = pytest.mark.filterwarnings("error:.*cannot write metrics")


@pytest.fixture(autouse=True)
def few_figures(request, monkeypatch):
    """Drawing takes most of the time, so only tests about figures draw."""
    if "figures" not in request.node.name:
        monkeypatch.setattr("vr_online.monitor.figures.tensorboard_figures", lambda history: {})


def snapshot(step, bins=4):
    grid = np.arange(bins, dtype=np.float64)
    return {
        "edges": np.linspace(0, 1, bins + 1),
        "p": np.full(bins, 1 / bins),
        "q": np.full(bins, 1 / bins),
        "grad_var": 1.0 + grid + step / 100,
        "grad_sq": 2.0 + grid,
        "loss": grid + step,
        "visits": np.full(bins, step, dtype=np.int64),
        "age": grid,
    }


def fill(monitor, steps):
    for step in steps:
        monitor.log(step, {"train/loss": 1.0 / step, "sampler/gain": 0.9}, snapshot(step), images=step * 8)


def strict_lines(path):
    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def events(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def scalar_points(folder, tag):
    return {e.step: e.value for e in events(folder).Scalars(tag)}


def back_date(folder):
    """TensorBoard reads event files in the order of their names, which begin with the second they were made in."""
    for path in folder.glob("events.out.tfevents.*"):
        _, _, _, second, rest = path.name.split(".", 4)
        path.rename(path.with_name(f"events.out.tfevents.{int(second) - 60}.{rest}"))


def test_one_line_a_log_step_with_the_names_of_tensorboard(tmp_path):
    with Monitor(tmp_path) as monitor:
        fill(monitor, [10, 20])
    lines = strict_lines(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["images"], r["train/loss"]) for r in lines] == [(10, 80, 0.1), (20, 160, 0.05)]
    assert all(isinstance(r["time"], float) for r in lines)
    shown = set(events(tmp_path / "tensorboard").Tags()["scalars"])
    assert set(lines[0]) - {"step", "images", "time"} <= shown
    assert lines[1]["bins/loss/03"] == 23.0
    assert scalar_points(tmp_path / "tensorboard", "bins/loss/03") == {10: 13.0, 20: 23.0}
    assert scalar_points(tmp_path / "tensorboard", "bins/grad_var/00") == pytest.approx({10: 1.1, 20: 1.2})


def test_loss_keeps_every_bit(tmp_path):
    loss = torch.tensor(1 / 3)
    with Monitor(tmp_path) as monitor:
        monitor.scalars(1, {"train/loss": loss})
    assert np.float32(read_records(tmp_path / "metrics.jsonl")[0]["train/loss"]) == loss.numpy()


def test_numbers_outside_json_survive_the_round_trip(tmp_path):
    with Monitor(tmp_path) as monitor:
        monitor.scalars(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
        monitor.bins(1, {"loss": np.array([1.0, np.nan])})
    strict_lines(tmp_path / "metrics.jsonl")
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert math.isnan(record["a"]) and record["b"] == math.inf and record["c"] == -math.inf
    assert math.isnan(read_records(tmp_path / "bins.jsonl")[0]["loss"][1])


def test_snapshots_are_stored_whole(tmp_path):
    with Monitor(tmp_path) as monitor:
        fill(monitor, [30])
    (record,) = read_records(tmp_path / "bins.jsonl")
    per_bin = {name: value for name, value in snapshot(30).items() if name != "edges"}
    assert set(record) == {"step", "images", "time", *per_bin}
    for name, value in per_bin.items():
        assert np.allclose(record[name], value, rtol=1e-5)
    assert record["images"] == 240


def test_error_bar_bounds_stand_two_errors_off(tmp_path):
    with Monitor(tmp_path) as monitor:
        monitor.scalars(1, {"sampler/achieved": 0.9, "sampler/achieved_error": 0.05})
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert record["sampler/achieved_low"] == pytest.approx(0.8)
    assert record["sampler/achieved_high"] == pytest.approx(1.0)


def test_resume_drops_later_lines_and_hides_later_points(tmp_path):
    with Monitor(tmp_path) as monitor:
        fill(monitor, [10, 20, 30])
    back_date(tmp_path / "tensorboard")
    with Monitor(tmp_path, resume_step=20) as monitor:
        monitor.log(25, {"train/loss": 7.0}, snapshot(25))
    for name in ("metrics.jsonl", "bins.jsonl"):
        assert [r["step"] for r in strict_lines(tmp_path / name)] == [10, 20, 25]
    assert scalar_points(tmp_path / "tensorboard", "train/loss") == pytest.approx({10: 0.1, 20: 0.05, 25: 7.0})


def test_resume_mends_a_line_torn_by_a_crash(tmp_path):
    with Monitor(tmp_path) as monitor:
        fill(monitor, [10, 20])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step":30,"train/lo')
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [10, 20]
    with Monitor(tmp_path, resume_step=20) as monitor:
        fill(monitor, [30])
    assert [r["step"] for r in strict_lines(tmp_path / "metrics.jsonl")] == [10, 20, 30]


def test_a_line_after_a_torn_one_is_not_lost(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"step":1}\n{"ste')
    append_record(path, {"step": 2})
    assert [r["step"] for r in read_records(path)] == [1, 2]


def test_truncation_killed_midway_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    for step in (1, 2, 3):
        append_record(path, {"step": step})
    before = path.read_bytes()
    monkeypatch.setattr(records.os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        truncate_records(path, 1)
    assert path.read_bytes() == before


def test_a_fresh_start_keeps_the_former_files_aside(tmp_path):
    with Monitor(tmp_path) as monitor:
        fill(monitor, [10, 20])
    back_date(tmp_path / "tensorboard")
    with Monitor(tmp_path) as monitor:
        fill(monitor, [5])
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [5]
    assert [r["step"] for r in read_records(tmp_path / "metrics.previous.jsonl")] == [10, 20]
    assert list(scalar_points(tmp_path / "tensorboard", "train/loss")) == [5]


def test_a_job_adds_its_points_beside_the_run_and_drops_nothing(tmp_path):
    monitor = Monitor(tmp_path)
    fill(monitor, [10])
    with Monitor(tmp_path, job="evaluation") as job:
        job.scalars(10, {"fid/fd_latent": 3.5})
    fill(monitor, [20])
    monitor.close()
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [10, 20]
    assert scalar_points(tmp_path / "tensorboard" / "evaluation", "fid/fd_latent") == {10: 3.5}
    assert list(scalar_points(tmp_path / "tensorboard", "train/loss")) == [10, 20]


def test_disabled_touches_nothing(tmp_path):
    monitor = Monitor(tmp_path / "run", load_config(None), enabled=False)
    fill(monitor, [1])
    monitor.images(1, "x", np.zeros((2, 2, 3), np.uint8))
    monitor.text("x", "y")
    monitor.flush()
    monitor.close()
    assert not (tmp_path / "run").exists()


def test_config_images_and_figures_are_shown(tmp_path):
    config = validate({"name": "shown-name"})
    with Monitor(tmp_path, config) as monitor:
        fill(monitor, [1])
        monitor.images(1, "samples", np.zeros((6, 5, 3), np.uint8))
    shown = events(tmp_path / "tensorboard")
    text = shown.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "shown-name" in text and "half_life" in text
    assert {"samples", "figures/variance", "figures/proposal", "figures/visits"} <= set(shown.Tags()["images"])
    assert (shown.Images("samples")[0].height, shown.Images("samples")[0].width) == (6, 5)


def test_custom_page_charts_only_documented_names(tmp_path):
    with Monitor(tmp_path):
        pass
    proto = events(tmp_path / "tensorboard").Tensors("custom_scalars__config__")[0].tensor_proto
    layout = layout_pb2.Layout.FromString(proto.string_val[0])
    assert [c.title for c in layout.category] == ["adaptation", "health"]
    documented = set(names.SCALARS) | {names.bin_name(q, 0, 4) for q in names.CURVES}
    import re

    tags = [t for c in layout.category for chart in c.chart for t in chart.multiline.tag]
    margins = [chart.margin for c in layout.category for chart in c.chart if chart.HasField("margin")]
    tags += [t for m in margins for s in m.series for t in (s.value, s.lower, s.upper)]
    assert len(tags) > 10 and margins
    for tag in tags:
        assert any(re.fullmatch(tag, name) for name in documented), tag


@pytest.mark.parametrize("proposal", ["online_vr", "loss_second_moment"])
def test_everything_the_sampler_tells_is_documented(proposal):
    from vr_online.config import TimestepConfig
    from vr_online.timesteps import OnlineSampler, attach_probe

    config = TimestepConfig(proposal=proposal, bins=4)
    probe = attach_probe(torch.nn.Sequential(torch.nn.Linear(3, 3)), config.probe) if proposal == "online_vr" else None
    sampler = OnlineSampler(config, probe=probe, batch_size=8)
    assert set(names.sampler_scalars(sampler.metrics())) <= set(names.SCALARS)
    assert set(sampler.snapshot()) - {"edges"} <= set(names.BINS)


def test_bin_names_sort_by_time():
    for bins in (4, 100, 1000):
        made = [names.bin_name("loss", i, bins) for i in range(bins)]
        assert made == sorted(made)
    assert names.bin_name("loss", 3, 32) == "bins/loss/03"


def test_history_for_heat_maps_stays_small_and_even(tmp_path, monkeypatch):
    from vr_online.monitor import monitor as module

    monkeypatch.setattr(module, "_HISTORY", 8)
    with Monitor(tmp_path) as monitor:
        for step in range(100):
            monitor._remember({"step": step})
        kept = [r["step"] for r in monitor._history]
    assert len(kept) <= 8 and kept[0] == 0 and kept[-1] >= 84
    assert len(set(np.diff(kept))) == 1


def test_figures_come_seldom_however_often_bins_do(tmp_path, monkeypatch):
    from vr_online.monitor import monitor as module

    drawn = []
    monkeypatch.setattr(module.figures, "tensorboard_figures", lambda history: drawn.append(len(history)) or {})
    clock = iter(range(0, 10**6))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    with Monitor(tmp_path) as monitor:
        monitor._drawn_at = -1e9
        for step in range(1, 300):
            monitor.bins(step, snapshot(step))
        during = len(drawn)
    assert 2 <= during <= 5  # a drawing costs one tick and may take one tick in a hundred
    assert len(drawn) == during + 1  # and once at the end


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_costs_metrics_not_the_run(tmp_path):
    monitor = Monitor(tmp_path)
    fill(monitor, [1])
    (tmp_path / "metrics.jsonl").unlink()
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fill(monitor, [2, 3, 4])
        monitor.close()
    about = [str(w.message) for w in caught if "metrics.jsonl" in str(w.message)]
    assert len(about) == 1 and "training goes on" in about[0]
    assert [r["step"] for r in read_records(tmp_path / "bins.jsonl")] == [1, 2, 3, 4]


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(UserError, match="metrics.jsonl: cannot read"):
        read_records(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="metrics.jsonl: holds no record"):
        read_records(tmp_path / "metrics.jsonl")
