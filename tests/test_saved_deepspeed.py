"""DeepSpeed's ZeRO shards: files of two ranks that deepspeed 0.19.8 wrote, against the same updates by torch alone.

The files in `tests/deepspeed` come from two CPU processes under gloo with `zero_optimization.stage` 2 and 3 in fp32,
the model, optimizer and data of `updated` on both ranks, and `save_checkpoint` after two updates.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from effcli.errors import DataError
from effcli.measure.optimizer_size import inspect_states
from effcli.saved import SavedOptimizer, read_saved, values_of

WRITTEN = Path(__file__).parent / "deepspeed"


def updated() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    weights, biases = ([p for p in model.parameters() if (p.dim() > 1) is big] for big in (True, False))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(2):
        batch = torch.randn(2, 7)
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return model, optimizer


def whole(found: SavedOptimizer, name: str, key: str) -> torch.Tensor:
    held = found.states[name][key]
    return torch.cat(held if isinstance(held, list) else [held])


@pytest.mark.parametrize("stage", [2, 3])
def test_the_shards_of_two_ranks_hold_the_state_that_torch_alone_arrives_at(stage: int) -> None:
    found = read_saved(WRITTEN / f"stage{stage}")
    assert (found.format, found.shards, found.names_known) == ("DeepSpeed ZeRO optimizer shards", 2, True)
    assert found.path == WRITTEN / f"stage{stage}" / "global_step2"
    assert found.members == (("0.weight", "2.weight"), ("0.bias", "2.bias"))
    assert [group["weight_decay"] for group in found.groups] == [0.1, 0.0]
    model, optimizer = updated()
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            held = whole(found, name, key)
            torch.testing.assert_close(held, optimizer.state[param][key].flatten())
            shown = list(values_of(found, f"={name}.{key}"))
            assert sum(each.shape[0] for each in shown) == param.numel()
    size = inspect_states(found.states.items())
    padding = sum(each.numel() for state in found.states["(padding)"].values() for each in state)
    # stage 2 fills each group up to a multiple of the ranks, stage 3 each parameter
    assert padding == 2 * {2: 0 + 2, 3: 1 + 1 + 1 + 1}[stage]
    assert size.state_bytes == 4 * (2 * 58 + padding) + 4 * 4  # a step for each group on each rank
    assert {name: size.by_parameter[name] for name, _ in model.named_parameters()} == {
        name: 2 * 4 * param.numel() for name, param in model.named_parameters()
    }
    assert any(f"{padding} elements of state fill up" in note for note in found.notes)
    assert any("fp32 weights of" in note for note in found.notes)


def test_one_ranks_file_is_read_as_what_it_is() -> None:
    found = read_saved(WRITTEN / "stage2" / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert found.notes[0] == "1 of 2 ranks' files are read; the state of the others is not counted."
    assert found.names_known


def test_without_the_parameters_shapes_stage_3_counts_by_partition(tmp_path: Path) -> None:
    for path in (WRITTEN / "stage3" / "global_step2").glob("*_optim_states.pt"):
        shutil.copy(path, tmp_path)
    found = read_saved(tmp_path)
    labels = [f"rank {rank}, part {part}" for rank in range(2) for part in range(2)]
    assert (found.names_known, list(found.states), found.members) == (False, labels, ((), ()))
    complete = inspect_states(read_saved(WRITTEN / "stage3").states.items())
    assert inspect_states(found.states.items()).tensors == complete.tensors
    assert any("amounts are by partition" in note for note in found.notes)
    assert not any("left out" in note for note in found.notes)
    (tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_text("no shapes")
    assert any(
        "parameters' shapes is left out" in note and "model_states.pt' is no file that torch.save wrote" in note
        for note in read_saved(tmp_path).notes
    )


@pytest.mark.parametrize("partitions", [[None, "x"], [], "2", None, -3], ids=str)
def test_an_odd_number_of_partitions_is_no_number_of_ranks(partitions: Any, tmp_path: Path) -> None:
    state = {"state": {0: {"exp_avg": torch.ones(6)}}, "param_groups": [{"params": [0]}]}
    torch.save(shard(state, partition_count=partitions), tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert not any("ranks' files are read" in note for note in read_saved(tmp_path).notes)


def shard(state: Any, **more: Any) -> dict[str, Any]:
    """Return a shard in the layout of stages 1 and 2 (`runtime/zero/stage_1_and_2.py`)."""
    own = {"base_optimizer_state": state, "single_partition_of_fp32_groups": [torch.ones(6)], "partition_count": [1]}
    return {"optimizer_state_dict": own | more, "ds_version": "0"}


def test_states_without_padding_by_group_are_read_too(tmp_path: Path) -> None:
    """The layout that `elastic_checkpoint` writes: a list of states instead of a `state_dict`."""
    torch.save(
        shard([{"step": 3, "exp_avg": torch.arange(6.0)}]), tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    found = read_saved(tmp_path)
    assert (found.groups, found.names_known) == ((), False)
    assert found.states["rank 0, part 0"]["exp_avg"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_shard_that_lies_or_calls_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = {"state": {0: {"exp_avg": torch.ones(6)}}, "param_groups": [{"params": [0]}]}

    class At:
        def __init__(self, start: Any, numel: Any) -> None:
            self.start, self.numel = start, numel

    At.__module__, At.__qualname__ = "effcli_test_at", "At"
    sys.modules["effcli_test_at"] = module = ModuleType("effcli_test_at")
    module.At = At  # type: ignore[attr-defined]
    try:
        for at, said in ((At(4, 3), "behind its flat tensor"), (At(-1, 3), "is damaged"), (At(0, "x"), "is damaged")):
            torch.save(shard(state, param_slice_mappings=[{"w": at}]), path)
            with pytest.raises(DataError, match=said):
                read_saved(tmp_path)
        torch.save(shard(state, param_slice_mappings=[{"w": At(1, 3)}]), path)
    finally:
        del sys.modules["effcli_test_at"]
    found = read_saved(tmp_path)
    assert {name: inspect_states([(name, state)]).state_bytes for name, state in found.states.items()} == {
        "(padding)": 12, "w": 12,
    }  # fmt: skip

    class Calls:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("true",)

    torch.save(shard(state, loss_scaler=Calls()), path)
    with pytest.raises(DataError, match="asks to run"):
        read_saved(tmp_path)
    torch.save({"a": 1}, path)
    with pytest.raises(DataError, match="no optimizer shard"):
        read_saved(tmp_path)
