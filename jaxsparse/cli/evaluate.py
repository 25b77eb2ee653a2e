# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse eval``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxsparse.ckpt import restore_state
from jaxsparse.cli.resolve import config_errors, resolve
from jaxsparse.cli.row_disks import open_trainer
from jaxsparse.cli.run_config import load_config
from jaxsparse.cli.run_folder import check_dense, choose_checkpoint, find_config
from jaxsparse.cli.splits import load_final_split
from jaxsparse.cli.tell import final_metrics, print_result


def run_eval(
    run_dir: str, assignments: Sequence[str], *, checkpoint: str | None, only_json: bool
) -> int:
    """Evaluates a state of a run, on the mesh there is now; returns the exit code.

    Args:
        run_dir: folder of the run.
        assignments: of ``--set``.
        checkpoint: ``latest``, ``best``, a step; None is the state the run is judged by.
        only_json: print the JSON line only.
    """
    config, source = load_config(find_config(run_dir), assignments)
    save = choose_checkpoint(run_dir, config, checkpoint)
    with config_errors(source):
        config = resolve(config, source)
        check_dense(config, Path(run_dir))
    with contextlib.ExitStack() as stack:
        with config_errors(source):
            trainer = stack.enter_context(open_trainer(config))
            split = load_final_split(config, trainer.emb.features)
        fresh = trainer.init(jax.random.key(config.run.seed))
        state = restore_state(save, trainer.emb, fresh, trainer.store)
        with config_errors(source):  # such as weights that are all 0
            result = final_metrics(trainer, state, split)
    print_result(result, Path(run_dir), only_json)
    return 0
