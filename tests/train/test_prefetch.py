# SPDX-License-Identifier: Apache-2.0
"""Batches drawn and packed ahead on a thread: same results, exact positions, an end for the thread.

That runs go on bitwise is tested in ``test_resume.py``, with the thread, and for several processes
in ``tests/scenarios.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import jaxsparse as js
from tests.ckpt import runs

EPOCH = -(-runs.ROWS // runs.BATCH)
THREAD = "jaxsparse-prefetch"


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == THREAD]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not threads()


@pytest.fixture(scope="module")
def trainer() -> Any:
    return runs.make_trainer(2)


class Watched:
    """A dataset that remembers which threads draw from it, and may fail at a batch."""

    def __init__(self, data: Any, fail_at: int = 0) -> None:
        self.data, self.fail_at = data, fail_at
        self.names: list[str] = []
        self.state, self.restore = data.state, data.restore

    def __iter__(self) -> Iterator[js.Batch]:
        for batch in self.data:
            self.names.append(threading.current_thread().name)
            if len(self.names) == self.fail_at:
                raise OSError("disk gone")
            yield batch


def arrays(seed: int = 5) -> Any:
    return runs.train_data(seed=seed).dataset


@pytest.mark.parametrize("prefetch", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_results_do_not_depend_on_it(trainer: Any, prefetch: int) -> None:
    def run(prefetch: int) -> tuple[Any, set[str]]:
        data = Watched(arrays())
        result = trainer.fit(
            data,
            steps=2 * EPOCH + 3,
            eval_dataset=runs.eval_data(),
            eval_every=9,
            log_every=4,
            progress=False,
            prefetch=prefetch,
        )
        return result, set(data.names)

    (want, here), (got, there) = run(0), run(prefetch)
    assert (here, there) == ({threading.main_thread().name}, {THREAD})
    runs.assert_same(runs.leaves(trainer, got.state), runs.leaves(trainer, want.state))
    assert runs.without_times(got.history) == runs.without_times(want.history)
    told = trainer.evaluate(got.state, runs.eval_data(), prefetch=0)
    assert trainer.evaluate(got.state, runs.eval_data(), prefetch=prefetch) == told
    scores = trainer.predict(got.state, runs.eval_data(), prefetch=0)
    np.testing.assert_array_equal(trainer.predict(got.state, runs.eval_data()), scores)


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_fit_that_ends_inside_a_pass_leaves_the_dataset_behind_it(
    trainer: Any, prefetch: int
) -> None:
    data, plain = arrays(), arrays()
    trainer.fit(data, steps=EPOCH + 3, progress=False, prefetch=prefetch)
    for _ in plain:
        pass
    batches = iter(plain)
    for _ in range(3):
        next(batches)
    assert data.state() == plain.state()
    assert len(list(data)) == EPOCH, "the next pass is a whole one"
    assert data.state()["epoch"] == 3


def test_an_error_of_the_dataset_comes_in_its_place(trainer: Any) -> None:
    data = Watched(arrays(), fail_at=6)
    with pytest.raises(OSError, match="disk gone") as caught:
        trainer.fit(data, steps=20, progress=False)
    assert int(caught.value.train_state.step) == 5
    assert data.state()["offset"] == 5 and not threads()


def test_a_bad_batch_is_refused_in_its_place(trainer: Any) -> None:
    batches = list(arrays())
    batches[3].dense[0, 0] = np.nan
    with pytest.raises(ValueError, match="dense is nan in sample 0, column 0") as caught:
        trainer.fit(batches, steps=20, progress=False)
    assert int(caught.value.train_state.step) == 3 and not threads()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_callback_that_fails_ends_the_thread(trainer: Any, error: type[BaseException]) -> None:
    def fail(event: js.FitEvent) -> bool:
        raise error("told")

    data = arrays()
    with pytest.raises(error, match="told"):
        trainer.fit(data, steps=20, log_every=3, callbacks=[fail], progress=False)
    assert data.state()["offset"] == 3 and not threads()


def test_a_callback_that_stops_ends_the_thread(trainer: Any) -> None:
    data = arrays()
    stop = [lambda event: event.step == 6]
    result = trainer.fit(data, steps=20, log_every=3, callbacks=stop, progress=False)
    assert int(result.state.step) == 6
    assert data.state()["offset"] == 6 and not threads()


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_the_dataset_may_be_evaluated_while_it_is_trained_on(
    tmp_path: Any, trainer: Any, prefetch: int
) -> None:
    """Saves in between know where the training is, not where the evaluation was."""

    def run(folder: str, steps: int, data: Any, judged: Any) -> Any:
        manager = js.CheckpointManager(tmp_path / folder, every=4)
        options = {"eval_dataset": judged, "eval_every": 4, "progress": False}
        return trainer.fit(data, steps=steps, checkpoint=manager, prefetch=prefetch, **options)

    want = run("whole", 2 * EPOCH, arrays(), arrays())
    data = arrays()
    run("part", 9, data, data)
    data = arrays()
    got = run("part", 2 * EPOCH, data, data)
    runs.assert_same(runs.leaves(trainer, got.state), runs.leaves(trainer, want.state))


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_a_forward_pass_that_fails_ends_its_thread(trainer: Any, method: str) -> None:
    state = trainer.init(jax.random.key(0))
    with pytest.raises(OSError, match="disk gone"):
        getattr(trainer, method)(state, Watched(arrays(), fail_at=3))
    assert not threads()


@pytest.mark.parametrize("steps", [2, 5])
def test_no_more_is_drawn_than_the_steps_need(trainer: Any, steps: int) -> None:
    """An iterator that cannot be set back goes on where the training was."""
    batches = list(arrays())
    batches[1].dense[:] = np.nan
    trainer.on_bad_sample = "skip"
    source = iter(batches)
    trainer.fit(source, steps=steps, progress=False)
    trainer.on_bad_sample = "error"
    assert next(source) is batches[steps + 1]


@pytest.mark.parametrize("prefetch", [-1, True, 1.5])
def test_a_wrong_depth_is_refused(trainer: Any, prefetch: Any) -> None:
    message = f"prefetch must be an int >= 0, got {prefetch}"
    with pytest.raises(ValueError, match=message):
        trainer.fit(arrays(), steps=1, prefetch=prefetch)
    with pytest.raises(ValueError, match=message):
        trainer.evaluate(trainer.init(jax.random.key(0)), arrays(), prefetch=prefetch)


class Slow(Watched):
    def __iter__(self) -> Iterator[js.Batch]:
        for batch in self.data:
            time.sleep(0.1)
            yield batch


def test_waiting_for_input_is_told(trainer: Any) -> None:
    trainer.fit(arrays(), epochs=1, progress=False)  # compiles

    def share(data: Any) -> float:
        history = trainer.fit(data, steps=8, log_every=8, progress=False).history
        return float(history[-1]["input_wait"])

    assert share(arrays()) < 0.8 < share(Slow(arrays()))


@pytest.mark.parametrize("prefetch", [0, 4])
def test_predictions_left_early_leave_the_next_ones_whole(trainer: Any, prefetch: int) -> None:
    data, state = arrays(), trainer.init(jax.random.key(0))
    some = trainer.logits(state, data, prefetch=prefetch)
    next(some)
    some.close()
    assert len(trainer.predict(state, data, prefetch=prefetch)) == runs.ROWS
    columns = runs.columns()
    columns["label"] = np.where(np.arange(runs.ROWS) == 40, 7, columns["label"])
    bad = js.data.from_arrays(columns, runs.BATCH, dense=["row"])
    with pytest.raises(ValueError, match="label"):
        trainer.evaluate(state, bad, prefetch=prefetch)
    assert len(trainer.predict(state, bad, prefetch=prefetch)) == runs.ROWS


class Counting:
    """A dataset that turns to its next pass only when it is asked for more than its last batch."""

    def __init__(self) -> None:
        self.batches, self.at = list(arrays()), 0

    def __iter__(self) -> Iterator[js.Batch]:
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0

    def state(self) -> dict[str, int]:
        return {"at": self.at}

    def restore(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_dataset_that_ends_its_pass_behind_its_last_batch(trainer: Any, prefetch: int) -> None:
    result = trainer.fit(Counting(), epochs=3, prefetch=prefetch, progress=False)
    assert int(result.state.step) == 3 * EPOCH


@pytest.mark.parametrize("prefetch", [0, 4])
def test_one_prefetcher_cannot_be_trained_and_judged_on(trainer: Any, prefetch: int) -> None:
    data = js.data.Prefetcher(arrays())
    with pytest.raises(RuntimeError, match="another loop over it began while this one was under"):
        trainer.fit(
            data, epochs=2, eval_dataset=data, eval_every=3, prefetch=prefetch, progress=False
        )


class Reusing:
    """A dataset that fills the same arrays for every batch."""

    def __iter__(self) -> Iterator[js.Batch]:
        held: js.Batch | None = None
        for batch in arrays():
            if held is None:
                held = batch
            if batch.num_samples != held.num_samples:
                return
            for old, new in ((held.labels, batch.labels), (held.dense, batch.dense)):
                np.copyto(old, new)  # type: ignore[arg-type]
            for name, keys in batch.features.items():
                np.copyto(held.features[name], keys)  # type: ignore[arg-type]
            yield held


def test_arrays_that_are_filled_anew_give_the_same_history(trainer: Any) -> None:
    def rows(data: Any, prefetch: int) -> list[str]:
        result = trainer.fit(data, epochs=1, log_every=5, prefetch=prefetch, progress=False)
        return runs.without_times(result.history)

    fresh = [batch for batch in arrays() if batch.num_samples == runs.BATCH]
    assert rows(Reusing(), 0) == rows(Reusing(), 4) == rows(fresh, 4)
