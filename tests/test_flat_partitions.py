"""Whole tensors of flat partitions, of stand-ins that DeepSpeed would have made; see `tests.deepspeed_jobs` for it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import torch

from effcli.engines.flat_partitions import FlatPartitions
from effcli.engines.whole_tensors import is_sharded
from effcli.measure.optimizer_size import inspect_optimizer


def test_partitions_are_found_by_model_and_optimizer_and_end_with_them() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    partitions = FlatPartitions(model, optimizer)
    assert FlatPartitions.of(model) is FlatPartitions.of(optimizer) is None
    master = torch.zeros(8)
    zero = SimpleNamespace(bit16_groups=[list(model.parameters())], single_partition_of_fp32_groups=[master])
    partitions.made(zero, model, optimizer)
    assert FlatPartitions.of(model) is FlatPartitions.of(optimizer) is partitions
    assert is_sharded(model)
    assert optimizer.param_groups[0]["params"] == [master]
    master.grad = torch.ones(8)
    optimizer.step()
    assert inspect_optimizer(optimizer).state_bytes == master.nbytes, "the momentum, and nothing of the model"
    gone = weakref.ref(model)
    del model, optimizer, partitions, zero, master
    gc.collect()
    assert gone() is None
