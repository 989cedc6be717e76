import json

import numpy as np
import pytest
from PIL import Image

from vr_online.cli import main
from vr_online.errors import UserError
from vr_online.monitor import Monitor
from vr_online.monitor.fid_figure import curves, fid_figure, quality
from vr_online.monitor.figures import heat_plot, panels, proposal_figure, rasterize, steps_plot, variance_figure
from vr_online.monitor.history import BinHistory, Scalars, axis
from vr_online.monitor.plot import plot, read_runs
from vr_online.monitor.records import read_records
from vr_online.monitor.run_figures import sampler_figure, smooth
from vr_online.monitor.runs import read_run

ALL = ["loss", "speed", "variance", "proposal", "sampler", "fid"]


def make_run(path, steps=range(10, 60, 10), bins=4, adaptive=True, seed=0):
    rng = np.random.default_rng(seed)
    with Monitor(path) as monitor:
        monitor._draw = lambda step: None
        for step in steps:
            values = {"train/loss": rng.random(), "speed/images_per_s": 100.0, "speed/step_s": 0.5}
            if adaptive:
                values.update({"sampler/gain": 0.9, "sampler/achieved": 0.92, "sampler/achieved_error": 0.01})
            p = rng.dirichlet(np.ones(bins))
            arrays = {"p": p, "q": np.full(bins, 1 / bins), "grad_var": rng.random(bins), "loss": rng.random(bins)}
            monitor.log(step, values, arrays if adaptive else None, images=step * 4)
    return path


def add_result(run, step, **content):
    folder = run / "evals" / str(step)
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"step": step, "images": step * 4, **content}))


def names_of(written):
    return [p.stem for p in written]


def test_every_figure_of_a_whole_run(tmp_path):
    run = make_run(tmp_path / "run")
    add_result(run, 20, metrics={"fd_latent": 9.0})
    written = plot([run])
    assert names_of(written) == ALL and {p.parent for p in written} == {run / "figures"}
    for path in written:
        image = np.asarray(Image.open(path))
        assert min(image.shape[:2]) > 300 and image.std() > 5  # something is drawn


def test_only_what_was_recorded_is_drawn(tmp_path):
    assert names_of(plot([make_run(tmp_path / "run", adaptive=False)])) == ["loss", "speed"]


def test_one_log_line_is_enough(tmp_path):
    assert names_of(plot([make_run(tmp_path / "run", steps=[10])])) == ALL[:-1]


@pytest.mark.parametrize("x", ["images", "step", "hours"])
def test_several_runs_in_one_folder(tmp_path, x):
    kinds = {"a": (4, True), "b": (6, True), "c": (4, False)}
    runs = [make_run(tmp_path / name, bins=bins, adaptive=on) for name, (bins, on) in kinds.items()]
    written = plot(runs, out=tmp_path / "out", x=x)
    assert names_of(written) == ALL[:-1]
    assert {p.parent for p in written} == {tmp_path / "out"}


def test_bins_that_were_never_seen_do_not_stop_a_figure(tmp_path):
    with Monitor(tmp_path) as monitor:
        for step in (1, 2):
            empty = np.full(4, np.nan)
            arrays = {"p": np.full(4, 0.25), "q": np.full(4, 0.25), "grad_var": empty, "loss": empty}
            monitor.log(step, {"train/loss": float("nan")}, arrays)
    assert {"variance", "proposal"} <= set(names_of(plot([tmp_path])))


def test_command_prints_the_files_and_fails_clearly(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main(["plot", str(run), "--only", "loss"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "figures" / "loss.png")
    assert main(["plot", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_missing_and_damaged_files_are_named(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="metrics.jsonl: cannot read"):
        plot([tmp_path / "run"])
    run = make_run(tmp_path / "other")
    add_result(run, 20)
    (run / "evals" / "20" / "result.json").write_text("{")
    with pytest.raises(UserError, match="20/result.json: cannot read"):
        plot([run])


def test_nothing_to_show_is_said(tmp_path):
    run = make_run(tmp_path / "run", adaptive=False)
    with pytest.raises(UserError, match="records nothing that variance, fid"):
        plot([run], only=["variance", "fid"])


def test_runs_get_names_that_tell_them_apart(tmp_path):
    runs = [make_run(tmp_path / part / "run", steps=[1]) for part in ("x", "y")]
    assert [r.name for r in read_runs(runs)] == ["x/run", "y/run"]
    with pytest.raises(UserError, match="given twice"):
        read_runs([runs[0], runs[0]])


def test_hours_count_training_and_not_the_pause_before_a_resume():
    records = [{"step": s, "time": t, "speed/step_s": 36.0} for s, t in ((100, 0.0), (200, 1e6))]
    assert Scalars.of(records).x["hours"] == pytest.approx([1.0, 2.0])


def test_lines_that_lack_a_name_leave_a_gap():
    scalars = Scalars.of([{"step": 1, "a": 1.0}, {"step": 2, "b": 2.0}])
    assert np.isnan(scalars.values["a"][1]) and scalars.values["b"][1] == 2.0
    assert axis(scalars.x, "images")[1] == "steps"


def test_history_keeps_records_of_the_present_bin_count():
    history = BinHistory.of([{"step": 1, "p": [1.0, 2.0]}, {"step": 2, "p": [1.0] * 3}, {"step": 3, "p": [2.0] * 3}])
    assert history.values["p"].shape == (2, 3) and list(history.x["step"]) == [2, 3] and history.bins == 3


def test_snapshots_without_the_usual_quantities_give_no_figure():
    history = BinHistory.of([{"step": 1, "other": [1.0, 2.0]}])
    assert variance_figure(history) is None and proposal_figure(history) is None


def test_proposal_is_drawn_as_a_density():
    history = BinHistory.of([{"step": 1, "images": 4, "p": [0.1, 0.2, 0.3, 0.4], "q": [0.25] * 4}])
    figure = proposal_figure(history)
    drawn, target = figure.axes[0].patches
    assert drawn.get_data().values == pytest.approx([0.4, 0.8, 1.2, 1.6])
    assert target.get_data().values == pytest.approx([1.0] * 4)


def test_heat_map_puts_bins_upwards_and_training_across():
    history = BinHistory.of([{"step": s, "images": s * 10, "v": [float(s), s + 0.5]} for s in (1, 2, 3)])
    figure, axes = panels(1, 1, "")
    heat_plot(axes[0, 0], history, history.values["v"], "images", "v")
    mesh = axes[0, 0].collections[0]
    assert np.array_equal(np.asarray(mesh.get_array()).reshape(2, 3), [[1.0, 2.0, 3.0], [1.5, 2.5, 3.5]])
    assert list(mesh.get_coordinates()[0, :, 0]) == [0, 10, 20, 30]
    assert list(mesh.get_coordinates()[:, 0, 1]) == [0, 0.5, 1]


def test_a_wild_start_does_not_flatten_the_gain(tmp_path):
    with Monitor(tmp_path) as monitor:
        monitor._draw = lambda step: None
        for step in range(1, 21):
            achieved = 50.0 if step < 5 else 0.93
            monitor.scalars(step, {"sampler/gain": 0.9, "sampler/achieved": achieved, "sampler/achieved_error": 0.01}, step)
    low, high = sampler_figure([read_run(tmp_path)], "step").axes[0].get_ylim()
    assert 0.8 < low < 0.9 and 1.0 < high < 1.1


def test_steps_plot_spans_the_unit_interval():
    figure, axes = panels(1, 1, "")
    steps_plot(axes[0, 0], np.array([1.0, 2.0]))
    assert list(axes[0, 0].patches[0].get_data().edges) == [0, 0.5, 1]
    assert rasterize(figure).dtype == np.uint8


def test_smoothing_keeps_constants_and_bridges_gaps():
    assert smooth(np.full(50, 3.0), 7) == pytest.approx(np.full(50, 3.0))
    assert smooth(np.array([1.0, np.nan, 3.0]), 3) == pytest.approx([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "result",
    [
        {"step": 1, "metric": "fid_clean", "value": 3.0, "metrics": {"fid_clean": 3.0, "kid_std": 0.1}, "seed": 7},
        {"step": 1, "metrics": {"fid_clean": 3.0, "note": "text"}, "seed": 7},
        {"step": 1, "metric": "fid_clean", "value": 3.0, "steps": 50},
    ],
)
def test_metrics_of_a_result_are_found_and_settings_are_not(result):
    assert quality(result) == {"fid_clean": 3.0}


def test_values_of_different_protocols_never_share_a_curve(tmp_path):
    run = make_run(tmp_path / "run")
    for step, solver in ((10, "heun"), (20, "heun"), (30, "euler")):
        add_result(run, step, metrics={"fd_latent": step / 10}, solver=solver, n=500)
    found = curves([read_run(run)], "fd_latent")
    assert {label: [r["step"] for r in results] for label, results in found.items()} == {"heun": [10, 20], "euler": [30]}
    (panel,) = fid_figure([read_run(run)], "step").axes
    assert [list(line.get_xdata()) for line in panel.get_lines()] == [[10, 20], [30]]


def test_runs_of_one_protocol_are_told_apart_by_name(tmp_path):
    runs = [make_run(tmp_path / name) for name in "ab"]
    for run in runs:
        add_result(run, 10, metrics={"fd_latent": 1.0}, solver="heun")
    assert list(curves(read_runs(runs), "fd_latent")) == ["a", "b"]


def test_results_of_other_settings_are_found(tmp_path):
    run = make_run(tmp_path / "run")
    add_result(run, 10, metrics={"fd_latent": 1.0})
    other = run / "evals" / "10" / "euler-50"
    other.mkdir()
    (other / "result.json").write_text(json.dumps({"step": 10, "metrics": {"fd_latent": 2.0}}))
    assert [quality(r)["fd_latent"] for r in read_run(run).evaluations] == [2.0, 1.0]


def test_evaluations_come_in_order_of_step(tmp_path):
    run = make_run(tmp_path / "run")
    for step in (100, 20, 3):
        add_result(run, step, metrics={"fd_latent": 1.0})
    assert [r["step"] for r in read_run(run).evaluations] == [3, 20, 100]


def test_a_run_still_being_written_can_be_drawn(tmp_path):
    run = make_run(tmp_path / "run")
    whole = len(read_records(run / "metrics.jsonl"))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step":60,')
    assert len(read_run(run).scalars.x["step"]) == whole
