# SPDX-License-Identifier: Apache-2.0
"""The manifest: what a checkpoint holds. Written last, and checked before anything is loaded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxsparse.addressing import ADDRESSING_VERSION
from jaxsparse.ckpt.errors import CheckpointError, DamagedError
from jaxsparse.dynamic import TTL, BloomAdmission, Dynamic
from jaxsparse.hashing import HASH_VERSION, Hashed
from jaxsparse.specs import FeatureSpec, TableSpec

FORMAT = 3
MANIFEST = "manifest.json"

STORED = "stored"
"""Entry of the tables of a row store."""

INIT_WORDS = "init_words"
"""Leaf: what rows that come later are drawn from."""

Manifest = dict[str, Any]

WAY_OUT = (
    "make tables, model and optimizer as they were when it was saved; to keep a table's rows in "
    "another model, write them to a file with `jaxsparse export` and start from them with "
    "`jaxsparse import`"
)
WAY_NEW = (
    "what the checkpoint lacks starts from its initial values with allow_new=True "
    "(`train --allow-new`)"
)


def describe_table(spec: TableSpec) -> dict[str, Any]:
    """What a table's rows mean: loading them under another meaning is an error."""
    keys, more = "identity", {}
    if isinstance(spec.keys, Hashed):
        keys = f"hashed {HASH_VERSION} {spec.keys.digest:032x}"
    if isinstance(spec.keys, Dynamic):
        keys, more = f"dynamic {HASH_VERSION}", _describe_dynamic(spec.keys)
    return {
        "vocabulary_size": spec.vocabulary_size,
        "embedding_dim": spec.embedding_dim,
        "dtype": str(spec.dtype),
        "keys": keys,
        "order": ADDRESSING_VERSION,
        "optimizer": type(spec.optimizer).__name__ if spec.trainable else "frozen",
        **more,
    }


def _describe_dynamic(keys: Dynamic) -> dict[str, Any]:
    """What is counted; how many rows there may be, and which go, may change from run to run."""
    admission, eviction = keys.admission, keys.eviction
    kind = "all" if admission is None else type(admission).__name__
    if isinstance(admission, BloomAdmission):
        kind += f" of {admission.bytes} bytes"
    return {
        "admission": kind,
        "times": isinstance(eviction, TTL) and eviction.seconds is not None,
    }


def describe_feature(spec: FeatureSpec) -> dict[str, Any]:
    """What a model has learned of a feature: its place among the others counts as well."""
    return {"name": spec.name, "table": spec.table.name, "combiner": spec.combiner}


def write_manifest(folder: Path, content: Manifest) -> None:
    """Writes a manifest, with the checksums of what does not carry its own."""
    small = {str(path.relative_to(folder)): _checksum(path) for path in _small_files(folder)}
    whole = {**content, "files": small}
    text = json.dumps({**whole, "checksum": _content_checksum(whole)}, allow_nan=False, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def check_files(folder: Path, manifest: Manifest) -> None:
    """Looks at every small file before any of them is understood.

    Raises:
        DamagedError: one is missing, cut or changed.
    """
    for name, checksum in manifest["files"].items():
        try:
            same = _checksum(folder / name) == checksum
        except OSError as error:
            raise DamagedError(f"{folder / name}: cannot be read: {error.strerror}") from error
        if not same:
            raise DamagedError(f"{folder / name}: is damaged (its checksum is another one)")


def _small_files(folder: Path) -> Iterator[Path]:
    """All but tables, whose blocks have checksums, and other states, with their own manifests."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path
        elif path.name == "dense":
            yield from sorted(inner for inner in path.rglob("*") if inner.is_file())


def _checksum(path: Path) -> int:
    return zlib.crc32(path.read_bytes())


def _content_checksum(content: Manifest) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """Reads a manifest.

    Raises:
        CheckpointError: there is none, or it is none that this version can read.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: no checkpoint there ({MANIFEST} is missing)") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path}: cannot be read: {error}") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise CheckpointError(f"{folder}: has format {version!r}, this version reads {FORMAT}")
    needed = {"tables", "features", "learning_rates", "leaves", "parts", "files", "checksum"}
    lacking = needed - set(manifest)
    if lacking:
        raise CheckpointError(f"{path}: lacks {sorted(lacking)}; is it of another program?")
    if manifest.pop("checksum") != _content_checksum(manifest):
        raise DamagedError(f"{path}: is damaged (its checksum is another one)")
    return dict(manifest)


def check_fit(
    folder: Path, saved: Manifest, wanted: Mapping[str, Any], allow_new: bool
) -> tuple[str, ...]:
    """Compares what was saved with what a state needs.

    Args:
        folder: named in errors.
        saved: the manifest.
        wanted: its ``tables``, ``features`` and ``leaves`` for the state that is to be loaded, and
            the names of tables whose rows are with a row store.
        allow_new: whether tables, features and leaves may be missing in it.

    Returns:
        Names of what is missing.

    Raises:
        CheckpointError: every table or leaf that differs, in one text with the way out.
    """
    wrong, new = [], []
    tables = _names(saved["tables"], wanted["tables"])
    for name in tables:
        old, now = saved["tables"].get(name), wanted["tables"].get(name)
        if old is None:
            new.append(f"tables/{name}")
        elif now is None:
            wrong.append(f"tables/{name}: saved, but there is no such table now")
        else:
            wrong += [
                f"tables/{name}: {field} was {old.get(field)!r}, is {now[field]!r}"
                for field in now
                if old.get(field) != now[field]
            ]
    stored = {*stored_facts(saved), *wanted[STORED]}
    new_features, wrong_features = _compare_features(saved["features"], wanted["features"])
    new, wrong = new + new_features, wrong + wrong_features
    for name in _names(saved["leaves"], wanted["leaves"]):
        table = _table_of(name)
        if table is not None and not (table in saved["tables"] and table in wanted["tables"]):
            continue  # told of the table already
        before, after = saved["leaves"].get(name), wanted["leaves"].get(name)
        if name == INIT_WORDS:
            continue  # only states with tables of a row store have it
        if table in stored and name.startswith("tables/"):
            if not is_value_array(name.rpartition("/")[2]):
                continue  # what it knows of its rows
            before, after = _of_a_row(before), _of_a_row(after)
        if before is None and table is None:
            new.append(name)
        elif before is None or after is None or before[:2] != after[:2]:
            wrong.append(f"{name}: saved {_leaf_text(before)}, wanted {_leaf_text(after)}")
    if new and not allow_new:
        wrong += [f"{name}: not in the checkpoint" for name in new]
    if wrong:
        ways = [WAY_OUT] if len(wrong) > len(new) or allow_new or not new else []
        ways += [WAY_NEW] if new and not allow_new else []
        lines = "\n  ".join(wrong)
        raise CheckpointError(f"{folder}: does not fit the state:\n  {lines}\n" + "; ".join(ways))
    return tuple(new)


def _compare_features(
    saved: list[dict[str, Any]], wanted: list[dict[str, Any]]
) -> tuple[list[str], list[str]]:
    """Features that are new, and what is wrong with the others."""
    before = {feature["name"]: feature for feature in saved}
    now = {feature["name"]: feature for feature in wanted}
    new = [f"features/{name}" for name in now if name not in before]
    wrong = [
        f"features/{name}: saved, but there is no such feature now"
        for name in before
        if name not in now
    ]
    both = [name for name in before if name in now]
    for name in both:
        wrong += [
            f"features/{name}: {field} was {before[name][field]!r}, is {now[name][field]!r}"
            for field in ("table", "combiner")
            if before[name][field] != now[name][field]
        ]
    order = [name for name in now if name in before]
    if order != both:
        wrong.append(f"features: their order was {both}, is {order}")
    return new, wrong


def leaf_name(table: str, array: str) -> str:
    """Name of an array of a table among the leaves."""
    return f"tables/{table}/{array}"


def arrays_of(manifest: Manifest, table: str) -> dict[str, list[Any]]:
    """``[shape, dtype]`` of a table's arrays by name."""
    prefix = leaf_name(table, "")
    return {
        name.removeprefix(prefix): leaf
        for name, leaf in manifest["leaves"].items()
        if name.rpartition("/")[0] + "/" == prefix
    }


def stored_facts(manifest: Manifest) -> dict[str, Any]:
    """What was saved beside the arrays of each table that a row store had, by name."""
    facts: dict[str, Any] = manifest.get(STORED, {}).get("tables", {})
    return facts


def is_value_array(array: str) -> bool:
    """Whether an array of a table holds the values of its rows."""
    return array == "rows" or array.startswith("slot.")


def _of_a_row(leaf: Any) -> Any:
    """Shape and dtype of one row: tables of a row store have as many as there are keys."""
    return None if leaf is None else [leaf[0][1:], leaf[1]]


def _table_of(name: str) -> str | None:
    if name.startswith("learning_rates/"):
        return name.removeprefix("learning_rates/")
    if name.startswith("tables/"):
        return name.removeprefix("tables/").rpartition("/")[0]
    return None


def _names(*groups: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for group in reversed(groups) for name in group))


def _leaf_text(leaf: Any) -> str:
    return "none" if leaf is None else f"{leaf[1]}{leaf[0]}"
