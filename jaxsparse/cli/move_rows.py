# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse import`` and ``jaxsparse export``: rows of tables from files and to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxsparse.ckpt.rows import export_rows, import_rows
from jaxsparse.cli.resolve import config_errors, make_collection, make_trainer, resolve
from jaxsparse.cli.run_config import load_config
from jaxsparse.cli.run_folder import find_checkpoint, find_config, make_manager, make_run_folder
from jaxsparse.cli.tell import print_json, tell
from jaxsparse.config import ConfigError


def run_import(
    run: str,
    files: Sequence[str],
    assignments: Sequence[str],
    *,
    run_dir: str | None,
    string_keys: bool,
) -> int:
    """Makes a run at step 0 whose tables hold the rows of files; returns the exit code.

    Args:
        run: the run's TOML.
        files: each ``TABLE=FILE``.
        assignments: of ``--set``.
        run_dir: as of ``train``.
        string_keys: of text files: keys are strings.
    """
    config, source = load_config(run, assignments)
    with config_errors(source):
        config = resolve(config, source)
        emb = make_collection(config)
        trainer = make_trainer(config, emb)
    pairs = [_pair(text, list(emb.tables)) for text in files]
    state = trainer.init(jax.random.key(config.run.seed))
    counts = {}
    for table, path in pairs:
        embeddings, counts[table] = import_rows(
            emb, state.embeddings, table, path, string_keys=string_keys or None
        )
        state = dataclasses.replace(state, embeddings=embeddings)
        tell(f"{counts[table]:,} rows of {table} from {path}")
    folder, _ = make_run_folder(config, run_dir)
    make_manager(folder, config).save(emb, state)
    tell(f"train it with: jaxsparse train --run-dir {folder} --resume must")
    print_json({"step": 0, "rows": counts}, folder)
    return 0


def run_export(run_dir: str, table: str, file: str, step: int | None) -> int:
    """Writes the rows of a table of a run to a file; returns the exit code."""
    config, _ = load_config(find_config(run_dir), ())
    checkpoint = find_checkpoint(run_dir, config)
    if step is not None:
        checkpoint = make_manager(run_dir, config).path(step)
    count = export_rows(checkpoint, table, file)
    tell(f"{count:,} rows of {table} of {checkpoint}")
    print_json({"rows": count, "file": file}, Path(run_dir))
    return 0


def _pair(text: str, tables: list[str]) -> tuple[str, str]:
    table, equals, path = text.partition("=")
    if not equals or table not in tables:
        raise ConfigError(f"{text!r}: expected TABLE=FILE with a table of {tables}")
    return table, path
