"""What ranks hold under DeepSpeed's ZeRO, against the paper's figures and against what DeepSpeed really holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from effcli.errors import UsageError
from effcli.memory.sharding.share import Sharding, Share
from effcli.memory.sharding.zero import zero_shares
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.hyper import resolve_hyper
from effcli.optim.registry import check_shards, default_hyper, entries, find
from effcli.spec import OptimSpec, Shard
from effcli.units import ParamInfo

_FOUND = find_spec("deepspeed")
needs_deepspeed = pytest.mark.skipif(
    _FOUND is None or _FOUND.origin is None,  # a folder of that name beside the tests is no package
    reason="deepspeed is not installed",
)

BLOCK = [
    ParamInfo(name="norm.weight", shape=(3072,)),
    ParamInfo(name="attention.weight", shape=(3072, 4 * 3072)),
    ParamInfo(name="mlp.weight", shape=(8 * 3072, 3072)),
]


def shares(
    parameters: Sequence[ParamInfo], shard: Shard, world_size: int, precision: str = "fp32"
) -> tuple[Share, ...]:
    return zero_shares(parameters, Sharding(shard=shard, world_size=world_size), precision)


def state_bytes(share: Share, name: str) -> int:
    entry = find(name)
    return predict_state(entry, share.parameters, resolve_hyper(entry, OptimSpec())).state_bytes


@pytest.mark.parametrize(("shard", "gigabytes"), [("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_a_model_of_7_5_billion_on_64_cards_takes_what_the_paper_says(shard: Shard, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, arXiv 1910.02054, figure 1: 7.5 billion parameters, 64 cards, Adam in mixed precision.

    The law may say more by the tensors that lie on a rank's edges, whose gradients stage 2 keeps whole.
    """
    parameters = [
        ParamInfo(name=f"layers.{layer}.{info.name}", shape=info.shape) for layer in range(66) for info in BLOCK
    ]
    assert sum(info.num_elements for info in parameters) == pytest.approx(7.5e9, rel=0.01)
    scale = 7.5e9 / sum(info.num_elements for info in parameters)
    edges = 2 * 2 * 8 * 3072 * 3072 / 1e9 if shard == "zero2" else 0
    for share in shares(parameters, shard, 64, "bf16"):
        held = share.weights_bytes + share.gradients_bytes + share.master_bytes + state_bytes(share, "adamw")
        assert gigabytes - 0.3 < held * scale / 1e9 < gigabytes + edges + 0.1


@pytest.mark.parametrize("world_size", [2, 3, 7, 64, 1000])
def test_partitions_cover_every_element_and_differ_by_less_than_their_padding(world_size: int) -> None:
    for shard in ("zero1", "zero2", "zero3"):
        held = shares(BLOCK, shard, world_size)
        assert len({share.parameters for share in held}) == 1
        whole = sum(info.num_elements for share in held for info in share.parameters)
        elements = sum(info.num_elements for info in BLOCK)
        assert elements <= whole <= elements + 3 * 2 * world_size


def test_a_gradient_of_a_large_tensor_lies_whole_on_each_rank_that_has_a_part_of_it() -> None:
    """`copy_grads_in_partition` copies whole parameters: an embedding is not divided in stage 2."""
    parameters = [ParamInfo(name="small.weight", shape=(10, 10)), ParamInfo(name="embed.weight", shape=(1000, 10))]
    assert [share.gradients_bytes for share in shares(parameters, "zero2", 4)] == [40400, 40000, 40000, 40000]
    assert [share.gradients_bytes for share in shares(parameters, "zero1", 4)] == [40400] * 4
    assert [share.gradients_bytes for share in shares(parameters, "zero3", 4)] == [10100] * 4


def test_a_rank_without_a_part_has_padding_to_step_and_no_gradients() -> None:
    (last,) = shares([ParamInfo(name="bias", shape=(3,))], "zero2", 4)[-1:]
    assert last.gradients_bytes == 0
    assert [info.shape for info in last.parameters] == [(2,)]


def test_a_state_in_8_bits_has_no_small_tensors_in_a_partition() -> None:
    """A hundred matrices below the 4,096 elements from which bitsandbytes quantises are one long vector here."""
    parameters = [ParamInfo(name=f"{index}.weight", shape=(40, 100)) for index in range(100)]
    (share, _) = shares(parameters, "zero1", 2)
    assert state_bytes(share, "adamw8bit") < state_bytes(share, "adamw32bit") * 0.27
    whole = predict_state(find("adamw8bit"), parameters, resolve_hyper(find("adamw8bit"), OptimSpec()))
    assert whole.num_quantised == 0


def test_what_works_on_whole_tensors_is_refused_with_what_to_use() -> None:
    for name, reason in {"muon": "matrices", "adafactor": "rows and columns", "lamb8bit": "norms"}.items():
        with pytest.raises(UsageError, match=rf"{name}.*zero2.*{reason}.*such as adamw"):
            check_shards(find(name), "zero2")
    check_shards(find("adamw8bit"), "zero3")
    with pytest.raises(UsageError, match="element by itself"):
        check_shards(find("torch.optim:AdamW"), "zero1")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what DeepSpeed holds in each of 2 processes, by case."""
    folder = tmp_path_factory.mktemp("deepspeed")
    cases = [f"{stage},{precision},adamw" for stage in (1, 2, 3) for precision in ("fp32", "bf16")]
    cases += ["2,bf16,sgd-momentum", "3,fp32,sgd-momentum", "3,bf16,adamw8bit"]
    cases += [
        f"2,fp32,{entry.name}" for entry in entries() if entry.package in (None, "bitsandbytes") and can_try(entry.name)
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.deepspeed_holds"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(folder), *dict.fromkeys(cases)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def can_try(name: str) -> bool:
    """Return whether DeepSpeed can make a step with it on a CPU, whatever it then is."""
    return name not in ("adagrad", "muon") and not name.startswith("paged")


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deepspeed_holds_the_bytes_that_the_law_says(held: list[dict[str, Any]]) -> None:
    from tests.deepspeed_holds import make_model

    parameters = parameter_infos(make_model())
    for rank, cases in enumerate(held):
        for case, found in cases.items():
            stage, precision, name = case.split(",")
            share = zero_shares(parameters, Sharding(shard=f"zero{stage}", world_size=2), precision)[rank]
            assert {key: found[key] for key in ("weights", "gradients", "master", "elements", "state")} == {
                "weights": share.weights_bytes,
                "gradients": share.gradients_bytes,
                "master": share.master_bytes,
                "elements": [info.num_elements for info in share.parameters],
                "state": state_bytes(share, name),
            }, case


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_not_refused_trains_as_in_one_process_and_what_is_refused_does_not(held: list[dict[str, Any]]) -> None:
    for case, found in held[0].items():
        entry = find(case.split(",")[2])
        if found["difference"] is None or entry.bits == 8:  # other blocks are other roundings
            continue
        try:
            check_shards(entry, "zero2", default_hyper(entry))
        except UsageError:
            assert found["difference"] > 1e-2, case
        else:
            assert found["difference"] < 1e-3, case


@needs_deepspeed
def test_the_sizes_of_buffers_are_deepspeeds_defaults() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from effcli.memory.sharding import zero

    defaults = DeepSpeedZeroConfig(stage=3)
    assert defaults.reduce_bucket_size == zero.REDUCE_BUCKET_ELEMENTS
    assert defaults.param_persistence_threshold == zero.PERSISTENT_ELEMENTS
    assert defaults.max_live_parameters == defaults.max_reuse_distance == zero.MAX_LIVE_ELEMENTS
    assert defaults.sub_group_size == zero.SUB_GROUP_ELEMENTS
