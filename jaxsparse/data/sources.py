# SPDX-License-Identifier: Apache-2.0
"""Files to read: local paths, globs and URLs, all through pyarrow's file systems."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import Any

from jaxsparse.data.schema import DataError

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclasses.dataclass(frozen=True)
class Source:
    """One file."""

    path: str
    """As the user knows it: what messages name."""

    location: str
    """Its path inside ``filesystem``."""

    filesystem: Any
    """A ``pyarrow.fs.FileSystem``."""

    num_bytes: int
    """Size of the file."""

    @property
    def is_local(self) -> bool:
        """Whether arrow itself reads the file, without Python."""
        from pyarrow import fs

        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.location).name

    def open(self) -> Any:
        """A pyarrow file that can seek.

        Raises:
            DataError: it cannot be opened.
        """
        with read_errors(self):
            return self.filesystem.open_input_file(self.location)


@contextmanager
def read_errors(source: Source) -> Iterator[None]:
    """Turns failures of the disk or the network into DataErrors that name the file."""
    try:
        yield
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{source.path}: cannot be read: {reason} "
            f"(the file has {source.num_bytes} bytes; is it complete?)"
        ) from error


def find_sources(paths: Paths) -> list[Source]:
    """The files that paths, globs and URLs stand for.

    Args:
        paths: one or several of a path, a pattern with ``*``, ``?``, ``[...]`` or ``**``, or a URL
            such as ``s3://bucket/day_*.parquet``, which needs the package fsspec.

    Returns:
        The files in the given order, those of a pattern sorted by name.

    Raises:
        DataError: nothing is given, a file is missing or empty, or a pattern matches none.
    """
    given = [paths] if isinstance(paths, str | PathLike) else list(paths)
    if not given:
        raise DataError("no data files are given")
    return [source for path in given for source in _expand(fspath(path))]


def is_among(file: Path, paths: Paths) -> bool:
    """Whether a file is one of those that local paths and patterns stand for, by whatever name."""
    given = [paths] if isinstance(paths, str | PathLike) else list(paths)
    if not file.exists():
        return False
    for path in (fspath(path).removeprefix("file://") for path in given):
        names = [path, *glob.glob(path, recursive=True)]
        if any(Path(name).exists() and file.samefile(name) for name in names):
            return True
    return False


def _expand(path: str) -> list[Source]:
    if "://" in path:
        names, filesystem, prefix = _remote(path)
    else:
        from pyarrow import fs

        # A file may be named as a pattern; then it is the file.
        found = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
        names = [path] if path in found or Path(path).is_file() else found
        filesystem, prefix = fs.LocalFileSystem(), ""
    if not names:
        raise DataError(f"{path}: no file matches")
    return [_source(filesystem, name, prefix) for name in names]


def _remote(url: str) -> tuple[list[str], Any, str]:
    from pyarrow import fs

    try:
        import fsspec
    except ImportError:
        raise DataError(f"{url}: URLs need the package fsspec: pip install fsspec") from None
    try:
        filesystem, location = fsspec.core.url_to_fs(url)
        names = sorted(filesystem.glob(location)) if glob.has_magic(location) else [location]
    except (ImportError, ValueError) as error:
        raise DataError(f"{url}: {error}") from error
    return names, fs.PyFileSystem(fs.FSSpecHandler(filesystem)), url.split("://")[0] + "://"


def _source(filesystem: Any, location: str, prefix: str) -> Source:
    from pyarrow import fs

    path = prefix + location.lstrip("/") if prefix else location
    try:
        info = filesystem.get_file_info(location)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if info.type == fs.FileType.NotFound:
        raise DataError(f"{path}: no such file")
    if info.type != fs.FileType.File:
        raise DataError(f"{path}: not a file")
    if not info.size:
        raise DataError(f"{path}: the file is empty")
    return Source(path, location, filesystem, info.size)
