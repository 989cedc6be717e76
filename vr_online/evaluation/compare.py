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
    own = [r for r in results if Path(r["file"]).parent.name == str(r["step"])]
    results = own if own and not where else results
    if which == "last":
        return results[-1]
    check_comparable({r["file"]: r for r in results})
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
        values = {who: _compared(result, name) for who, result in results.items()}
        if len({repr(value) for value in values.values()}) > 1:
            problems.append(f"  {name}: {_who_has_what(values)}")
    if problems:
        listed = "\n".join(problems)
        raise NotComparable(
            f"these numbers cannot be ranked, since they differ in\n{listed}\nevaluate the runs again with the same settings"
        )


def _compared(result: dict[str, Any], name: str) -> Any:
    """The field; of an adaptive solver no nfe, which there follows from the model and its tolerances."""
    return None if name == "nfe" and result.get("solver") == "dopri5" else field(result, name)


def _who_has_what(values: dict[str, Any]) -> str:
    """`50 (a, b), 250 (c)`."""
    owners: dict[str, list[str]] = {}
    for who, value in values.items():
        owners.setdefault(_short(value), []).append(who)
    return ", ".join(f"{value} ({', '.join(whose)})" for value, whose in owners.items())


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 40 else str(value)


def table(results: dict[str, dict[str, Any]], ranked: bool = True) -> str:
    """Rows of results, best value first where they may be ranked, otherwise in the order given."""
    rows = [{**result, "run": who} for who, result in results.items()]
    if ranked:
        rows.sort(key=lambda row: row["value"])
    names = dict.fromkeys(name for row in rows for name in row["metrics"] if not name.endswith("_std"))
    others = [name for name in names if name not in {row["metric"] for row in rows}]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    head = [*("/".join(metrics) if c == "value" else c for c in COLUMNS), *others]
    cells = [[_cell(row.get(c)) for c in COLUMNS] + [_cell(row["metrics"].get(o)) for o in others] for row in rows]
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in [head, *cells])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def compare(runs: Sequence[str], which: str = "last", step: Optional[int] = None, where: Sequence[str] = ()) -> str:
    """The table of several runs.

    Raises:
        NotComparable: the numbers may not be ranked; the message holds the unranked table and what differs.
    """
    chosen = {run: choose(Path(run), which, step, where) for run in dict.fromkeys(runs)}
    try:
        check_comparable(chosen)
    except NotComparable as reason:
        raise NotComparable(f"{reason}\n\nnot ranked:\n{table(chosen, ranked=False)}") from None
    return table(chosen)
