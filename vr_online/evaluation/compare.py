"""Tables runs by their evaluations, and refuses to rank numbers that are not comparable."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional, Sequence

from vr_online.errors import UserError
from vr_online.evaluation.results import COMPARED, field, find_results

COLUMNS = ("run", "step", "images", "value", "n", "solver", "nfe", "cfg", "weights")


class NotComparable(UserError):
    """Results whose difference says nothing about the models."""


def choose(run_dir: Path, which: str = "last", step: Optional[int] = None, where: Sequence[str] = ()) -> dict[str, Any]:
    """One result of a run.

    Args:
        which: `last` step evaluated, or the `best` value.
        step: only results of this step.
        where: `field=value`, to choose among results of several settings, such as `n=50000` or `cfg=1.5`.

    Raises:
        UserError: the run has none, or the settings of several are left.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run")
    results = [r for r in find_results(run_dir) if (step is None or r["step"] == step) and all(_matches(r, w) for w in where)]
    if not results:
        wanted = "".join([f" of step {step}" if step is not None else "", f" with {' '.join(where)}" if where else ""])
        raise UserError(f"{run_dir}: no evaluation{wanted}; make one with `vr-online fid {run_dir}`")
    if which == "last":
        results = [r for r in results if r["step"] == results[-1]["step"]]
        own = [r for r in results if Path(r["file"]).parent.name == str(r["step"])]
        return (own or results)[-1]
    check_comparable({f"{r['file']}": r for r in results})
    return min(results, key=lambda r: r["value"])


def _matches(result: dict[str, Any], condition: str) -> bool:
    name, equals, wanted = condition.partition("=")
    if not equals:
        raise UserError(f"{condition!r}: expected field=value, such as n=50000")
    value = field(result, {"steps": "solver_steps"}.get(name, name))
    try:
        return float(value) == float(wanted)
    except (TypeError, ValueError):
        return str(value) == wanted


def check_comparable(results: dict[str, dict[str, Any]]) -> None:
    """Raises `NotComparable`, naming each field that differs and who has which value.

    Args:
        results: result by the name it is shown under.
    """
    problems = []
    for name in COMPARED:
        values = {who: field(result, name) for who, result in results.items()}
        if len({_hashable(value) for value in values.values()}) > 1:
            problems.append(f"  {name}: " + ", ".join(f"{_short(value)} ({who})" for who, value in values.items()))
    if problems:
        raise NotComparable("these numbers cannot be ranked, since they differ in\n" + "\n".join(problems) + "\nevaluate the runs again with the same settings")


def _hashable(value: Any) -> str:
    return repr(value)


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 40 else str(value)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Rows of results, best value first."""
    rows = sorted(({**result, "run": who} for who, result in results.items()), key=lambda row: row["value"])
    others = list(dict.fromkeys(name for row in rows for name in row["metrics"] if name != row["metric"] and not name.endswith("_std")))
    head = [*(rows[0]["metric"] if c == "value" else c for c in COLUMNS), *others]
    cells = [[_cell(row.get(c)) for c in COLUMNS] + [_cell(row["metrics"].get(o)) for o in others] for row in rows]
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in [head, *cells])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def compare(runs: Sequence[str], which: str = "last", step: Optional[int] = None, where: Sequence[str] = ()) -> str:
    """The table of several runs; raises `NotComparable` when their numbers may not be ranked."""
    chosen = {run: choose(Path(run), which, step, where) for run in dict.fromkeys(runs)}
    check_comparable(chosen)
    return table(chosen)
