"""Reference statistics: mean and covariance of a data set's features, and how they were made.

An npz file holds `mu` and `sigma` (readable by clean-fid, pytorch-fid and ADM tools alike), `n`, `meta`
(JSON: extractor with file hash, preprocessing and its hash, source) and, on request, `feats` (n, d) for
KID and precision / recall. Files of clean-fid and ADM, which have no `meta`, are read as they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Iterator, Optional

import numpy as np
import torch
from tqdm import tqdm

from vr_online.errors import UserError
from vr_online.evaluation.accumulate import Accumulator
from vr_online.evaluation.features import Extractor, to_uint8
from vr_online.evaluation.frechet import Moments
from vr_online.evaluation.group import Group
from vr_online.evaluation.npz import load_npz, save_npz
from vr_online.evaluation.precision import full_float32
from vr_online.evaluation.sources import ImageSource, LatentSource, open_source


def digest(value: Any) -> str:
    """SHA-256 (hex) of a JSON-able value, key order aside."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Reference statistics.

    Attributes:
        moments: mean (d,), covariance (d, d), n.
        protocol: `vr_online`, `adm` or `plain` (clean-fid and pytorch-fid files say nothing about themselves).
        meta: extractor, preprocessing, preprocessing_hash, source; empty for foreign files.
        features: (n, d) float32, or None.
        path: the file they came from.
    """

    moments: Moments
    protocol: str
    meta: dict[str, Any]
    features: Optional[np.ndarray] = None
    path: str = ""

    @property
    def hash(self) -> str:
        """SHA-256 of the numbers themselves, so that a copy in another container is still the same reference."""
        joined = np.concatenate([self.moments.mean, self.moments.cov.ravel()]).astype("<f8")
        return hashlib.sha256(joined.tobytes()).hexdigest()

    def save(self, path: str | os.PathLike) -> None:
        """Writes the npz aside and renames it.

        Raises:
            UserError: the file cannot be written.
        """
        moments, meta = self.moments, np.str_(json.dumps(self.meta))
        arrays = {"mu": moments.mean, "sigma": moments.cov, "n": np.int64(moments.n), "meta": meta}
        if self.features is not None:
            arrays["feats"] = self.features
        save_npz(path, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Statistics":
        """Reads our npz, clean-fid's or ADM's.

        Raises:
            UserError: the file is missing, damaged, or its arrays are no mean and covariance.
        """
        arrays = load_npz(path, ("mu", "sigma", "n", "meta", "feats", "mu_s"))
        missing = [key for key in ("mu", "sigma") if key not in arrays]
        if missing:
            raise UserError(
                f"{path}: no array {' or '.join(missing)}, so no reference statistics; make them with `vr-online fid stats`"
            )
        mean = np.asarray(arrays["mu"], dtype=np.float64)
        cov = np.asarray(arrays["sigma"], dtype=np.float64)
        _check_arrays(path, mean, cov)
        meta = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
        protocol = "vr_online" if meta else ("adm" if "mu_s" in arrays else "plain")
        return cls(Moments(mean, cov, int(arrays.get("n", 0))), protocol, meta, arrays.get("feats"), str(path))


def _check_arrays(path: str | os.PathLike, mean: np.ndarray, cov: np.ndarray) -> None:
    if mean.ndim != 1 or cov.shape != (mean.size, mean.size):
        raise UserError(f"{path}: mu has shape {mean.shape} and sigma {cov.shape}; expected (d,) and (d, d)")
    if not (np.isfinite(mean).all() and np.isfinite(cov).all()):
        raise UserError(f"{path}: mu or sigma holds numbers that are not finite; make the statistics again")
    if not np.allclose(cov, cov.T, rtol=1e-4, atol=1e-6 * max(float(np.abs(cov).max()), 1e-30)):
        raise UserError(f"{path}: sigma is not symmetric, so it is no covariance; make the statistics again")


def check_reference(statistics: Statistics, extractor: Extractor, dim: int) -> None:
    """Raises `UserError` unless the statistics belong to this extractor and its preprocessing.

    Args:
        dim: length of the extractor's features.
    """
    where = statistics.path or "reference statistics"
    if statistics.moments.dim != dim:
        raise UserError(
            f"{where}: {statistics.moments.dim} features, but {extractor.name} gives {dim}; make statistics with the same extractor"
        )
    if statistics.protocol == "adm" and extractor.name == "inception" and extractor.metric != "fid_legacy_tensorflow":
        raise UserError(
            f"{where}: an ADM reference, computed with TensorFlow's bilinear resize, but evaluation.resize is "
            f"{extractor.preprocessing['resize']}; set evaluation.resize=legacy_tensorflow"
        )
    made = statistics.meta.get("extractor")
    if not made:
        return
    ours = extractor.describe()
    different = [
        f"{key} {made.get(key)!r} in the file, {ours[key]!r} now"
        for key in ("name", "hash", "preprocessing")
        if made.get(key) != ours[key]
    ]
    if different:
        raise UserError(
            f"{where}: made with another extractor: {'; '.join(different)}; make them again with `vr-online fid stats`"
        )


def metric_name(statistics: Statistics, extractor: Extractor) -> str:
    """`fid_adm` for ADM's protocol (its reference file and resize), otherwise the extractor's own."""
    if statistics.protocol == "adm" and extractor.metric == "fid_legacy_tensorflow":
        return "fid_adm"
    return extractor.metric


def _batches(samples: Iterator[np.ndarray], batch_size: int) -> Iterator[np.ndarray]:
    """Stacks neighbours of equal shape, at most `batch_size` of them."""
    pending: list[np.ndarray] = []
    for sample in samples:
        if pending and (len(pending) == batch_size or sample.shape != pending[0].shape):
            yield np.stack(pending)
            pending = []
        pending.append(sample)
    if pending:
        yield np.stack(pending)


def sample_features(batch: np.ndarray, source: ImageSource | LatentSource, extractor: Extractor, codec: Any) -> torch.Tensor:
    """Features (B, d) of a batch as `source` yields it."""
    tensor = torch.from_numpy(batch)
    if isinstance(source, ImageSource):
        return extractor(tensor)
    if extractor.space == "latent":
        # The extractor's normalisation, the run's own: the reference may have been written with another.
        return extractor(extractor.norm.normalize(tensor))
    with torch.no_grad():
        return extractor(to_uint8(codec.decode(tensor.to(extractor.device))))


def compute_statistics(
    source: ImageSource | LatentSource,
    extractor: Extractor,
    *,
    codec: Any = None,
    batch_size: int = 64,
    keep_features: bool = False,
    group: Optional[Group] = None,
    progress: bool = True,
) -> Statistics:
    """Streams a source through an extractor; memory does not grow with n unless features are kept.

    Args:
        codec: decodes latent shards for an image extractor.
        keep_features: also keep every feature vector, for KID and precision / recall.
        group: each rank takes its share; the result is the same on every rank, features only on the main one.

    Raises:
        UserError: a sample cannot be read, or there are fewer than 2.
    """
    if isinstance(source, ImageSource) and extractor.space == "latent":
        raise UserError(f"{source.origin}: features: latent needs latent shards, not images")
    group, error = group or Group(), None
    gathered = Accumulator(0, keep_features=keep_features)
    try:
        with full_float32():
            _stream(source, extractor, codec, batch_size, gathered, group, progress)
    except Exception as failure:
        error = failure
    group.raise_together(error)
    dim = max(group.gather(gathered.sums.dim if gathered.sums else 0))
    if not dim:
        raise UserError(f"{source.origin}: no samples")
    total = gathered.reduce(group, dim)
    features = total.ordered_features() if keep_features and group.is_main else None
    return Statistics(total.sums.moments(), "vr_online", _meta(source, extractor), features)


def _stream(
    source: ImageSource | LatentSource,
    extractor: Extractor,
    codec: Any,
    batch_size: int,
    gathered: Accumulator,
    group: Group,
    progress: bool,
) -> None:
    total = source.count and -(-source.count // group.world_size)
    with tqdm(total=total, unit="sample", desc="statistics", leave=False, disable=not (progress and group.is_main)) as bar:
        for number, batch in enumerate(_batches(source.samples(group.rank, group.world_size), batch_size)):
            features = sample_features(batch, source, extractor, codec)
            gathered.add(number * group.world_size + group.rank, 0, features, 0, extractor)
            bar.update(len(batch))


def _meta(source: ImageSource | LatentSource, extractor: Extractor) -> dict[str, Any]:
    from vr_online import __version__

    described = {"extractor": extractor.describe(), "samples": source.describe()}
    return {**described, "preprocessing_hash": digest(described), "source": source.origin, "version": __version__}


def load_reference(
    reference: str,
    extractor: Extractor,
    *,
    cache: Optional[Path] = None,
    codec_path: Optional[str] = None,
    keep_features: bool = False,
    group: Optional[Group] = None,
    progress: bool = True,
) -> Statistics:
    """Reference statistics from an npz file, or computed from a folder of shards or images.

    Batches are those of `compute_statistics`, whatever the evaluation's: sums in another order differ in their last bits, and
    one folder would be two references.

    Args:
        cache: folder where computed statistics are kept, under a name that changes with the source.
        keep_features: the reference's own features are needed (KID, precision / recall).

    Raises:
        UserError: nothing usable at `reference`, or an npz without the features asked for.
    """
    group, error, opened = group or Group(), None, None
    try:
        opened = open_reference(str(reference), keep_features)
    except Exception as failure:
        error = failure
    group.raise_together(error)
    if isinstance(opened, Statistics):
        return opened
    source = opened
    key = digest([source.fingerprint(), extractor.describe(), keep_features])[:16]
    path = cache / f"reference-{key}.npz" if cache else None
    # The main rank decides for all: a file that appears between two looks must not split the ranks.
    if group.from_main(path is not None and path.exists()):
        return dataclasses.replace(Statistics.load(path), path=str(reference))
    statistics = compute_statistics(
        source,
        extractor,
        codec=source_codec(source, extractor, codec_path),
        keep_features=keep_features,
        group=group,
        progress=progress,
    )
    if path is not None and group.is_main:
        statistics.save(path)
    return dataclasses.replace(statistics, path=str(reference))


def open_reference(reference: str, keep_features: bool) -> Statistics | ImageSource | LatentSource:
    """The statistics in an npz, or the source they are still to be computed from; raises `UserError`."""
    if not reference.endswith(".npz"):
        return open_source(reference)
    statistics = Statistics.load(reference)
    if keep_features and statistics.features is None:
        raise UserError(
            f"{reference}: kid and pr need the reference's features; make it by `vr-online fid stats --keep-features`"
        )
    return statistics


def source_codec(source: ImageSource | LatentSource, extractor: Extractor, path: Optional[str] = None) -> Any:
    """The codec that turns a source into images, or None where none is needed."""
    if isinstance(source, ImageSource) or extractor.space == "latent":
        return None
    from vr_online.data.codecs import codec_for

    return codec_for(source.info, path, extractor.device)
