"""Paths between noise and data, prediction targets and solvers: pure maths, no input or output."""

from vr_online.flow.paths import Path, PathSample, get_path
from vr_online.flow.targets import Flow

__all__ = ["Flow", "Path", "PathSample", "get_path"]
