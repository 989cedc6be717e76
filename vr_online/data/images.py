"""Labelled images to encode: an index over folders, tars and Parquet files, and how one image is prepared.

An index is a list of small picklable `Item`s, each saying where one image's bytes lie, so that any process
can read any slice of it.
"""

from __future__ import annotations

import csv
import fnmatch
import functools
import glob
import gzip
import io
import json
import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional, Sequence

import numpy as np

from vr_online.errors import UserError
from vr_online.files import written_aside

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_MAX_IMAGE_BYTES = 256 << 20


class Item(NamedTuple):
    """One image: a name for messages, its label, and the place of its bytes."""

    name: str
    label: int
    place: tuple[Any, ...]
    """("file", path), ("tar", path, offset, size) or ("parquet", path, column, row group, row)."""


_Found = tuple[str, Any, tuple]  # (name, label as found: an integer or a class name, place)


@dataclass(frozen=True)
class ImageIndex:
    """Images in a fixed order with the names of their labels; `seekable` says that any order reads equally fast."""

    items: list[Item]
    class_names: list[str]
    seekable: bool = True


def open_index(
    source: str,
    *,
    labels: Optional[str] = None,
    class_names: Optional[str] = None,
    include: str = "*",
    scratch: Optional[Path] = None,
) -> ImageIndex:
    """Finds the images of `source`.

    Args:
        source: a folder of images in class sub-folders; a folder, a file or a glob of tars (`key.jpg` with
            `key.cls`, or class folders inside; `.tar`, `.tar.gz`, `.tgz`); or of Parquet files in Hugging Face's
            image layout.
        labels: for a folder, a CSV (`file,label`) or JSON file of labels instead of class sub-folders.
        class_names: a JSON list or text file of names, in the order of the labels; None looks for `classes.json`
            beside tars, and else takes the names of the class folders in sorted order.
        include: shell-style pattern on the names inside `source`, such as `train/*`.
        scratch: folder in which compressed tars are unpacked once; needed only for those.

    Raises:
        UserError: nothing there, or a label cannot be understood; the message names the file.
    """
    files = _expand(source)
    kind = _kind(source, files)
    if kind == "tar":
        class_names = class_names or _names_beside(files[0])
    names = _read_names(Path(class_names)) if class_names else []
    if kind == "parquet":
        index = _parquet_index(files, include, names)
    elif kind == "tar":
        index = _labelled(_tar_images([_seekable(f, scratch) for f in files], include), names)
    else:
        index = _labelled(_folder_images(Path(source), labels, include), names)
    if not index.items:
        raise UserError(f"{source}: no images match {include!r} (looked for {', '.join(IMAGE_SUFFIXES)})")
    for item in index.items:
        if not 0 <= item.label < len(index.class_names):
            raise UserError(f"{item.name}: label {item.label} is out of range: {source} has {len(index.class_names)} classes")
    return index


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _expand(source: str) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.name.lower().endswith((*_TAR_SUFFIXES, ".parquet")))
        return inside or [path]
    found = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(source))
    if not found:
        raise UserError(f"{source}: no such file or folder")
    return found


def _kind(source: str, files: Sequence[Path]) -> str:
    if files[0].is_dir():
        return "folder"
    if all(f.suffix.lower() == ".parquet" for f in files):
        return "parquet"
    if all(f.name.lower().endswith(_TAR_SUFFIXES) for f in files):
        return "tar"
    raise UserError(f"{source}: expected a folder of images, tars ({', '.join(_TAR_SUFFIXES)}) or .parquet files, and only one of them")


# folders

def _folder_images(root: Path, labels: Optional[str], include: str) -> list[_Found]:
    names = sorted(
        Path(folder, file).relative_to(root).as_posix()
        for folder, _, files in os.walk(root, followlinks=True)
        for file in files
        if is_image(file)
    )
    names = [n for n in names if fnmatch.fnmatch(n, include)]
    given = _read_labels(Path(labels), names) if labels else {n: _class_of(n, root) for n in names}
    return [(n, given[n], ("file", str(root / n))) for n in names]


def _class_of(name: str, root: Any) -> str:
    parts = name.split("/")
    if len(parts) < 2:
        raise UserError(f"{root}: the image {name} lies in no class folder; sort images into one folder per class, or give --labels")
    return parts[-2]


def _labelled(found: list[_Found], names: list[str]) -> ImageIndex:
    """Integer labels keep their value; others are numbered as in `names`, or without it in sorted order."""
    labels = {label for _, label, _ in found}
    if all(isinstance(label, int) for label in labels):
        return ImageIndex([Item(*f) for f in found], names or [str(i) for i in range(max(labels, default=-1) + 1)])
    labels = sorted(map(str, labels))
    known = set(labels) <= set(names)
    if names and not known and len(names) != len(labels):
        absent = next(label for label in labels if label not in names)
        raise UserError(f"class {absent!r} is not among the {len(names)} class names; name every class in --class-names (or classes.json)")
    number = {name: i for i, name in enumerate(names if known else labels)}
    return ImageIndex([Item(name, number[str(label)], place) for name, label, place in found], names or labels)


def _read_labels(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """{image: label} of a CSV with the columns file and label, or JSON `{file: label}`, `[[file, label], ...]`
    or either of those under the key `labels`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the labels: {error.strerror}") from None
    rows = _json_labels(path, text) if path.suffix.lower() == ".json" else [r[:2] for r in csv.reader(io.StringIO(text)) if r]
    try:
        table = {str(file): label for file, label in rows}
    except (TypeError, ValueError):
        raise UserError(f"{path}: expected pairs of an image's name and its label") from None
    missing = next((n for n in names if n not in table), None)
    if missing:
        raise UserError(f"{path}: has no label for {missing}; names are relative to the image folder")
    used = {n: table[n] for n in names}
    whole = all(isinstance(v, int) or (isinstance(v, str) and v.strip().isdigit()) for v in used.values())
    return {n: int(v) for n, v in used.items()} if whole else {n: str(v).strip() for n, v in used.items()}


def _json_labels(path: Path, text: str) -> list:
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if isinstance(tree, dict) and "labels" in tree:
        tree = tree["labels"]
    return list(tree.items()) if isinstance(tree, dict) else tree


def _read_names(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
        names = json.loads(text) if path.suffix.lower() == ".json" else text.splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot read class names: {error}") from None
    if isinstance(names, dict):  # {"0": "cat", ...}
        names = [names[k] for k in sorted(names, key=int)]
    return [str(n) for n in names]


# tars

def _names_beside(tar: Path) -> Optional[str]:
    beside = tar.with_name("classes.json")
    return str(beside) if beside.is_file() else None


def _seekable(tar: Path, scratch: Optional[Path]) -> tuple[Path, Path]:
    """(tar as named by the user, uncompressed tar to read); a compressed one is unpacked into `scratch` once."""
    if tar.suffix.lower() == ".tar":
        return tar, tar
    if scratch is None:
        raise UserError(f"{tar}: compressed tars need a scratch folder")
    plain = scratch / f"{tar.name}.unpacked.tar"
    if not plain.exists():
        try:
            with written_aside(plain) as aside, gzip.open(tar, "rb") as packed, open(aside, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        except (UserError, EOFError) as error:
            raise UserError(f"{tar}: cannot unpack: {error}") from None
    return tar, plain


def _tar_images(tars: Sequence[tuple[Path, Path]], include: str) -> list[_Found]:
    found: list[_Found] = []
    for named, plain in tars:
        members = dict(_members(named, plain))
        images = [n for n in members if is_image(n) and fnmatch.fnmatch(n, include)]
        keyed = any(n.endswith(".cls") for n in members)
        for name in images:
            if keyed:
                label: Any = _cls_label(named, plain, name, members)
            else:  # of several tars without folders, each is a class, as ImageNet's are
                label = named.stem if "/" not in name and len(tars) > 1 else _class_of(name, named)
            found.append((f"{named.name}:{name}", label, ("tar", str(plain), *members[name])))
    return found


def _members(named: Path, plain: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (offset, size)) of each regular file."""
    try:
        with tarfile.open(plain, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # or a million headers stay in memory
                if member.isreg():
                    yield member.name.removeprefix("./"), (member.offset_data, member.size)
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{named}: not a readable tar ({error}); is it truncated?") from None


def _cls_label(named: Path, plain: Path, name: str, members: dict[str, tuple[int, int]]) -> int:
    folder, _, file = name.rpartition("/")
    key = f"{folder}/{file.split('.')[0]}" if folder else file.split(".")[0]
    if f"{key}.cls" not in members:
        raise UserError(f"{named}: {name} has no label: expected the member {key}.cls")
    text = _pread(str(plain), *members[f"{key}.cls"])
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{named}: {key}.cls holds {text[:20]!r}, expected an integer") from None


# Parquet

def _parquet_index(files: Sequence[Path], include: str, class_names: list[str]) -> ImageIndex:
    """Rows in file order: a column of `{bytes, path}` images and an integer column `label`."""
    parquet = _pyarrow()
    items: list[Item] = []
    for path in files:
        try:
            file = parquet.ParquetFile(path)
            image, label = _columns(file.schema_arrow, path)
            class_names = class_names or _feature_names(file.schema_arrow, label)
            for group in range(file.num_row_groups):
                for row, y in enumerate(file.read_row_group(group, columns=[label]).column(0).to_pylist()):
                    items.append(Item(f"{path.name}:row-group {group} row {row}", int(y), ("parquet", str(path), image, group, row)))
        except (OSError, TypeError, ValueError) as error:  # pyarrow's errors derive from ValueError and OSError
            raise UserError(f"{path}: not a readable Parquet file of labelled images: {error}") from None
    items = [i for i in items if fnmatch.fnmatch(i.name, include)]
    return ImageIndex(items, class_names or [str(y) for y in range(max((i.label for i in items), default=-1) + 1)], seekable=False)


def _columns(schema: Any, path: Path) -> tuple[str, str]:
    image = next((n for n in ("image", "img", "jpg", "png") if n in schema.names), None)
    label = next((n for n in ("label", "labels", "fine_label", "cls") if n in schema.names), None)
    if image is None or label is None:
        raise UserError(f"{path}: expected an image and a label column, found {', '.join(schema.names)}")
    return image, label


def _feature_names(schema: Any, label: str) -> list[str]:
    """Class names from the metadata that Hugging Face's `datasets` writes."""
    try:
        return list(json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]["names"])
    except (KeyError, TypeError, ValueError):
        return []


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError("Parquet files need pyarrow: pip install 'vr_online[parquet]'") from None
    return parquet


@functools.lru_cache(maxsize=2)
def _row_group(path: str, column: str, group: int) -> list[bytes]:
    values = _pyarrow().ParquetFile(path).read_row_group(group, columns=[column]).column(0).to_pylist()
    return [v["bytes"] if isinstance(v, dict) else v for v in values]


# one image

@functools.lru_cache(maxsize=64)
def _open(path: str) -> io.BufferedReader:
    return open(path, "rb", buffering=0)


def _pread(path: str, offset: int, size: int) -> bytes:
    payload = os.pread(_open(path).fileno(), size, offset)  # no shared position: safe in threads
    if len(payload) != size:
        raise UserError(f"{path}: truncated: {size} bytes expected at {offset}, found {len(payload)}")
    return payload


def read_bytes(item: Item) -> bytes:
    """The encoded image; raises `UserError` naming it."""
    kind, path, *rest = item.place
    try:
        if kind == "file":
            if os.path.getsize(path) > _MAX_IMAGE_BYTES:
                raise UserError(f"{item.name}: larger than {_MAX_IMAGE_BYTES >> 20} MiB, refused")
            return Path(path).read_bytes()
        if kind == "tar":
            if rest[1] > _MAX_IMAGE_BYTES:
                raise UserError(f"{item.name}: larger than {_MAX_IMAGE_BYTES >> 20} MiB, refused")
            return _pread(path, *rest)
        column, group, row = rest
        return _row_group(path, column, group)[row]
    except OSError as error:
        raise UserError(f"{item.name}: cannot read: {error}") from None


def load_image(item: Item, size: int) -> np.ndarray:
    """RGB uint8 (3, size, size), cropped by `center_crop`; raises `UserError` naming a corrupt image."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read_bytes(item))) as image:
            return np.ascontiguousarray(np.asarray(center_crop(image.convert("RGB"), size)).transpose(2, 0, 1))
    except UserError:
        raise
    except Exception as error:  # PIL's decoders raise almost anything on damaged files
        raise UserError(f"{item.name}: not a readable image ({error}); mend or remove it, or pass --on-error skip") from None


def center_crop(image: Any, size: int) -> Any:
    """ADM's preprocessing (guided-diffusion): halve with a box filter while at least twice too large, resize the
    short side to `size` bicubically, cut the middle square out."""
    from PIL import Image

    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))
