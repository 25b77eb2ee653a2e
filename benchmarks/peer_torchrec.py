# SPDX-License-Identifier: Apache-2.0
"""The worker that times the peer: ``python -m benchmarks.peer_torchrec`` (see `workers`).

FBGEMM's table-batched embedding with its fused optimizer, which is what TorchRec runs on, and a
DLRM in PyTorch, on the CPU. Nothing of jax or of this package is imported.
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from typing import Any

from benchmarks.workers import Task, peak_bytes, resident_bytes, serve
from benchmarks.workload import BOTTOM, NUM_DENSE, RATE, TOP, Workload

NOT_THERE = "torch and fbgemm-gpu-cpu are not installed here ({}): `make bench` installs them"


def _load() -> tuple[Any, Any]:
    """The modules of torch and of FBGEMM's embedding."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    try:
        import torch
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
    except ImportError as error:
        raise RuntimeError(NOT_THERE.format(error)) from error
    return torch, fbgemm


class PeerTask:
    """Tables with a fused optimizer, and a DLRM around them if the workload has one."""

    def __init__(self, workload: Workload) -> None:
        """Makes them and runs every batch once."""
        self.base = resident_bytes()
        self.torch, fbgemm = _load()
        self.torch.manual_seed(0)
        self.torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.workload = workload
        self.tables = self._tables(fbgemm)
        num_bags = workload.tables * workload.batch
        self.offsets = self.torch.arange(0, num_bags * workload.bag + 1, workload.bag)
        self.ids = [self.torch.from_numpy(batch.reshape(-1)) for batch in workload.draw()]
        self.ones = self.torch.ones(workload.batch, workload.tables * workload.dim)
        if workload.part == "dlrm":
            self._make_dense()
        for number in range(len(self.ids)):
            self.step(number)
        self.facts = {"torch": self.torch.__version__, "threads": self.torch.get_num_threads()}

    def _tables(self, fbgemm: Any) -> Any:
        spec = (
            self.workload.rows,
            self.workload.dim,
            fbgemm.EmbeddingLocation.HOST,
            fbgemm.ComputeDevice.CPU,
        )
        rules = {
            "adagrad": fbgemm.OptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD,
        }
        return fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * self.workload.tables,
            optimizer=rules[self.workload.rule],
            learning_rate=RATE,
            eps=1e-8,
            pooling_mode=fbgemm.PoolingMode.SUM,
        )

    def _make_dense(self) -> None:
        torch, dim = self.torch, self.workload.dim
        num_vectors = self.workload.tables + 1
        self.rows, self.columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.bottom = self._layers((NUM_DENSE, *BOTTOM, dim), ends_in_relu=True)
        self.top = self._layers((dim + self.rows.numel(), *TOP, 1), ends_in_relu=False)
        parameters = [*self.bottom.parameters(), *self.top.parameters()]
        self.optimizer = torch.optim.Adagrad(parameters, lr=RATE, fused=True)
        self.loss = torch.nn.BCEWithLogitsLoss()
        self.dense, self.labels = map(torch.from_numpy, self.workload.dense())

    def _layers(self, widths: tuple[int, ...], ends_in_relu: bool) -> Any:
        nn = self.torch.nn
        layers: list[Any] = []
        for num_inputs, num_outputs in itertools.pairwise(widths):
            layers += [nn.Linear(num_inputs, num_outputs), nn.ReLU()]
        return nn.Sequential(*(layers if ends_in_relu else layers[:-1]))

    def step(self, number: int) -> None:
        pooled = self.tables(self.ids[number % len(self.ids)], self.offsets)
        if self.workload.part == "sparse":
            pooled.backward(self.ones)
            return
        self.optimizer.zero_grad(set_to_none=True)
        shape = (self.workload.batch, self.workload.tables, self.workload.dim)
        beside = self.bottom(self.dense)
        vectors = self.torch.cat([beside[:, None], pooled.view(shape)], dim=1)
        dots = self.torch.bmm(vectors, vectors.transpose(1, 2))[:, self.rows, self.columns]
        logits = self.top(self.torch.cat([beside, dots], dim=1))[:, 0]
        self.loss(logits, self.labels).backward()
        self.optimizer.step()

    def settle(self) -> None:
        """Every step has waited for itself."""

    def set_threads(self, count: int) -> None:
        self.torch.set_num_threads(count)

    def memory(self) -> dict[str, int]:
        """Resident now and at most, and before torch was loaded."""
        return {
            "resident_bytes": resident_bytes(),
            "peak_bytes": peak_bytes(),
            "base_bytes": self.base,
        }


def prepare(workload: Workload, options: dict[str, Any]) -> Task:
    """The task of a workload; the peer has no options."""
    if options:
        raise ValueError(f"the peer has no options, got {options}")
    return PeerTask(workload)


if __name__ == "__main__":
    serve(prepare, check=_load)
