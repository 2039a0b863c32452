"""What DeepSpeed holds in each process of a run, in bytes: started by torchrun, each process writes a file of JSON.

python -m torch.distributed.run --nproc-per-node N -m tests.deepspeed_holds FOLDER STAGE,PRECISION,OPTIMIZER ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.distributed import get_rank, get_world_size

from effcli.optim.groups import decay_groups
from effcli.optim.hyper import resolve_hyper
from effcli.optim.registry import find
from effcli.spec import OptimSpec

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
FEATURES = 13


def make_model() -> nn.Module:
    """Return a small model with odd sizes, a normalisation, and a matrix that does not train."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 31), nn.LayerNorm(31), nn.Linear(31, 403), nn.Linear(403, 17, bias=False), nn.Linear(17, 5)
    )
    model[3].weight.requires_grad = False
    return model


def main(folder: Path, cases: Iterable[str]) -> None:
    """Write what this process holds in each case."""
    deepspeed.init_distributed(dist_backend="gloo")
    found = {}
    for case in cases:
        stage, precision, name = case.split(",")
        found[case] = holds(int(stage), precision, name)
    (folder / f"{get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")


def holds(stage: int, precision: str, name: str) -> dict[str, Any]:
    """Return bytes of weights and 32-bit copies, of gradients where they are complete, of state after two updates.

    `difference` is how far the largest weight is from that of a run of one process with plain tensors, as a share of
    the largest change of a weight; in 32 bits and with whole weights only.
    """
    model = make_model()
    optimizer = _optimizer(name, model)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5_000},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # its default is 1.0
    } | ({precision: {"enabled": True}} if precision != "fp32" else {})
    engine, zero, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    gradients = 0
    for micro in range(4):
        engine.backward(_loss(engine, _rows(micro, get_rank()).to(PRECISIONS[precision])))
        gradients = max(gradients, _gradients(stage, zero, model))
        engine.step()
    masters = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    return {
        "weights": num_bytes(parameter.ds_tensor if stage == 3 else parameter for parameter in model.parameters()),
        "gradients": gradients,
        "master": num_bytes(masters),
        "elements": [master.numel() for master in masters],
        "state": num_bytes(
            value for state in zero.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ),
        "difference": _difference(name, model) if stage < 3 and precision == "fp32" else None,
    }


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    entry = find(name)
    return entry.build(decay_groups(model, 0.01), resolve_hyper(entry, OptimSpec()))


def _rows(micro: int, rank: int) -> torch.Tensor:
    return torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(10 * micro + rank))


def _loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model(rows)
    return (outputs.float() - 1).square().mean()


def _difference(name: str, trained: nn.Module) -> float:
    start, plain = make_model(), make_model()
    optimizer = _optimizer(name, plain)
    for update in range(2):
        rows = [_rows(micro, rank) for micro in (2 * update, 2 * update + 1) for rank in range(get_world_size())]
        _loss(plain, torch.cat(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _furthest(plain, trained) / _furthest(plain, start)


def _furthest(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((first - second).abs().max()) for first, second in pairs)


def _gradients(stage: int, zero: Any, model: nn.Module) -> int:
    """Return the bytes of gradients; in stage 1 those that wait for the window's end, in stage 2 the largest buffer.

    What stage 2 keeps beside that is the zeros that fill up the last rank's partition.
    """
    if stage == 3:
        return num_bytes([zero.grad_partitions_flat_buffer])
    if stage == 1:
        return num_bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    kept = [part for parts in zero.averaged_gradients.values() for part in parts or ()]
    return max((num_bytes([part]) for part in kept), default=0)


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
