"""Fixed densities over t in [0, 1] (t = 0 noise, t = 1 data), named by short specs such as `logit_normal(0, 1)`.

A spec is parsed without torch, so a configuration can be checked before any device work. Each density is
given by its distribution function, and a bin's mass is a difference of two of its values: exact, whatever
the number of bins. SD3, FLUX and diffusers run time the other way, t_sd3 = 1 - t; their densities are
translated here, so `mode(s)`, `cosmap` and `shift(alpha)` take the parameters those papers print, while
`logit_normal(m, s)` is stated in our t (SD3's rf/lognorm(m, s) is `logit_normal(-m, s)` here).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np

from vr_online.errors import UserError


class DensityError(UserError, ValueError):
    """A density spec that cannot be used: unknown name, wrong arguments or unreadable file."""


@dataclass(frozen=True)
class Spec:
    """A parsed density spec: its name and its arguments (numbers, or one file name)."""

    name: str
    args: tuple = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(str(a) for a in self.args)})" if self.args else self.name


@dataclass(frozen=True)
class Density:
    """A density on [0, 1] by its distribution function, vectorised over float64 arrays.

    `help` is one line for `--help` and the documentation; `check` returns what is wrong with the arguments,
    or None.
    """

    parameters: tuple[str, ...]
    cdf: Callable[..., np.ndarray]
    help: str
    check: Callable[..., str | None] = lambda *args: None

    @property
    def takes_file(self) -> bool:
        return self.parameters == ("file",)


def _logit_normal(t: np.ndarray, m: float, s: float) -> np.ndarray:
    from scipy.special import logit, ndtr

    return ndtr((logit(t) - m) / s)


def _mode(t: np.ndarray, s: float) -> np.ndarray:
    """SD3 (Esser et al. 2024), section 3.1: t_sd3 = 1 - u - s (cos^2(pi u / 2) - 1 + u), so t = 1 - t_sd3
    increases with u and its distribution function is the inverse, found by bisection."""
    low, high = np.zeros_like(t), np.ones_like(t)
    for _ in range(60):
        u = (low + high) / 2
        below = u + s * (np.cos(np.pi * u / 2) ** 2 - 1 + u) < t
        low, high = np.where(below, u, low), np.where(below, high, u)
    return np.where(t <= 0, 0.0, np.where(t >= 1, 1.0, (low + high) / 2))


def _cosmap(t: np.ndarray) -> np.ndarray:
    """SD3: density 2 / (pi - 2 pi t + 2 pi t^2), the same in either direction of time."""
    return np.arctan2(t, 1 - t) * 2 / np.pi


def _shift(t: np.ndarray, alpha: float) -> np.ndarray:
    """SD3 equation 23, FLUX, Open-Sora: t_sd3 = alpha u / (1 + (alpha - 1) u); alpha > 1 leans to the noise."""
    y = 1 - t
    return 1 - y / (alpha - (alpha - 1) * y)


def _beta(t: np.ndarray, a: float, b: float) -> np.ndarray:
    from scipy.special import betainc

    return betainc(a, b, t)


def _table(t: np.ndarray, file: str) -> np.ndarray:
    table = read_table(file)
    cumulative = np.concatenate([[0.0], np.cumsum(table.density * np.diff(table.edges))])
    return np.interp(t, table.edges, cumulative / cumulative[-1])


def _positive(name: str) -> Callable[..., str | None]:
    return lambda *args: None if args[-1] > 0 else f"{name} must be above 0"


_MODE_MAX = 2 / (math.pi - 2)

DENSITIES: dict[str, Density] = {
    "uniform": Density((), lambda t: t, "every t alike"),
    "logit_normal": Density(("m", "s"), _logit_normal, "logit(t) ~ N(m, s^2); m > 0 leans to the data", _positive("s")),
    "mode": Density(
        ("s",), _mode, "SD3's mode sampling with heavy tails",
        lambda s: None if -1 <= s <= _MODE_MAX else f"s must lie in [-1, {_MODE_MAX:.4f}]",
    ),
    "cosmap": Density((), _cosmap, "SD3's image of the cosine schedule"),
    "shift": Density(("alpha",), _shift, "resolution shift of SD3 and FLUX; alpha > 1 leans to the noise", _positive("alpha")),
    "beta": Density(
        ("a", "b"), _beta, "Beta(a, b) in t", lambda a, b: None if a > 0 and b > 0 else "a and b must be above 0"
    ),
    "table": Density(("file",), _table, "piecewise constant, from an npz or JSON file with `density` and optional `edges`"),
    "vr_static": Density(("file",), _table, "offline loss-gradient variance, written by `vr-online density vr-static`"),
}


@dataclass(frozen=True)
class Table:
    """A tabulated density: `edges` (K+1,) rising from 0 to 1, `density` (K,) not negative, and the file's notes."""

    edges: np.ndarray
    density: np.ndarray
    notes: dict


def read_table(file: str) -> Table:
    """Reads an npz or JSON table; raises `DensityError` naming the file and what is wrong with it."""
    path = Path(file)
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text())
        else:
            with np.load(path, allow_pickle=False) as npz:
                content = {name: npz[name] for name in npz.files}
        density = np.asarray(content["density"], np.float64)
        edges = np.asarray(content.get("edges", np.linspace(0, 1, density.size + 1)), np.float64)
    except FileNotFoundError:
        raise DensityError(f"{file}: no such density table; write one with `vr-online density vr-static --out {file}`") from None
    except KeyError:
        raise DensityError(f"{file}: expected an array `density` (and optionally `edges`) in the table") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DensityError(f"{file}: not a readable density table (npz or JSON expected): {error}") from None
    _check_table(file, edges, density)
    return Table(edges, density, {k: _plain(v) for k, v in content.items() if k not in ("edges", "density")})


def _plain(value):
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _check_table(file: str, edges: np.ndarray, density: np.ndarray) -> None:
    if density.ndim != 1 or edges.shape != (density.size + 1,):
        raise DensityError(f"{file}: edges {edges.shape} must have one entry more than density {density.shape}")
    if edges[0] != 0 or edges[-1] != 1 or not (np.diff(edges) > 0).all():
        raise DensityError(f"{file}: edges must rise strictly from 0 to 1")
    if not np.isfinite(density).all() or (density < 0).any() or density.sum() <= 0:
        raise DensityError(f"{file}: density must be finite, not negative and not zero everywhere")


def write_table(file: str | Path, edges: np.ndarray, density: np.ndarray, **notes) -> None:
    """Writes a table that `table(file)` and `vr_static(file)` read: npz, or JSON by its suffix."""
    if Path(file).suffix == ".json":
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in notes.items()}
        Path(file).write_text(json.dumps({"edges": edges.tolist(), "density": density.tolist(), **plain}, indent=1))
    else:
        with open(file, "wb") as handle:
            np.savez(handle, edges=edges, density=density, **notes)


def split(spec: str) -> Spec:
    """`name(arg, ...)` taken apart, names not checked. Raises `DensityError` when it does not have this form."""
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:\(\s*(.*?)\s*\)\s*)?", spec)
    if not match:
        raise DensityError(f"{spec!r} is not a density: expected a form such as logit_normal(0, 1) or uniform")
    name, inside = match.group(1), match.group(2)
    return Spec(name, tuple(a.strip().strip("'\"") for a in inside.split(",")) if inside else ())


def unknown(name: str, valid: list[str]) -> DensityError:
    """The error for an unknown name, with the nearest valid one."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    hint = f"; nearest valid name: {near[0]}" if near else ""
    return DensityError(f"unknown density {name!r}{hint} (valid: {', '.join(valid)})")


def numbers(spec: Spec, parameters: tuple[str, ...], required: int | None = None) -> Spec:
    """`spec` with its arguments as floats, between `required` and len(parameters) of them."""
    required = len(parameters) if required is None else required
    if not required <= len(spec.args) <= len(parameters):
        takes = f"({', '.join(parameters)})" if parameters else "no arguments"
        raise DensityError(f"{spec}: {spec.name} takes {takes}, got {len(spec.args)}")
    try:
        values = tuple(float(a) for a in spec.args)
    except ValueError:
        raise DensityError(f"{spec}: the arguments of {spec.name} must be numbers") from None
    if not all(math.isfinite(v) for v in values):
        raise DensityError(f"{spec}: the arguments of {spec.name} must be finite")
    return Spec(spec.name, values)


def parse(spec: str, also: tuple[str, ...] = ()) -> Spec:
    """A fixed density's spec, checked: name, number and range of arguments, and that a named file is a table.

    Args:
        also: other names the caller accepts, only to be offered when `spec` is unknown.
    """
    parts = split(spec)
    density = DENSITIES.get(parts.name)
    if density is None:
        raise unknown(parts.name, [*DENSITIES, *also])
    if density.takes_file:
        file = spec.partition("(")[2].rpartition(")")[0].strip().strip("'\"")  # a name may hold commas
        if not file:
            raise DensityError(f"{spec}: {parts.name} takes one file name, as in {parts.name}(density.npz)")
        read_table(file)
        return Spec(parts.name, (file,))
    parsed = numbers(parts, density.parameters)
    problem = density.check(*parsed.args)
    if problem:
        raise DensityError(f"{spec}: {problem}")
    return parsed


def cdf(spec: Spec | str, t: np.ndarray) -> np.ndarray:
    """P(T <= t), float64, for t in [0, 1] of any shape."""
    spec = parse(spec) if isinstance(spec, str) else spec
    with np.errstate(divide="ignore"):
        return DENSITIES[spec.name].cdf(np.asarray(t, np.float64), *spec.args)


def bin_masses(spec: Spec | str, bins: int, path: str | None = None) -> np.ndarray:
    """The mass of each of `bins` equal cells of [0, 1]: (bins,) float64 summing to 1.

    Args:
        path: name of the interpolation path in use; a `vr_static` table made for another is refused.
    """
    spec = parse(spec) if isinstance(spec, str) else spec
    if spec.name == "vr_static":
        made_for = read_table(spec.args[0]).notes.get("path")
        if path is not None and made_for is not None and str(made_for) != path:
            raise DensityError(f"{spec.args[0]}: made for the {made_for} path, but flow.path is {path}; compute it again with --path {path}")
    masses = np.diff(cdf(spec, np.linspace(0, 1, bins + 1)))
    masses = np.clip(masses, 0, None)
    return masses / masses.sum()
