"""State of bitsandbytes' optimizers: which tensors are in 8 bit, what that takes, whose overrides bind."""

from __future__ import annotations

import copy

import bitsandbytes
import pytest
import torch

from effcli.measure.optimizer_size import inspect_optimizer
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.groups import decay_groups
from effcli.optim.registry import entries, find, resolve_hyper
from effcli.spec import OptimSpec
from effcli.units import Placement
from tests.tiny_models import measured, set_gradients, stepped, tiny_distilbert

BARE, EMBEDDINGS_KEPT = 295_648, 702_096
TINY_DISTILBERT_BYTES = {
    "adam": (295_648, 1_115_664), "adamw": (295_648, 1_115_664), "lion": (147_824, 557_832),
    "ademamix": (442_448, 1_673_496), "sgd": (147_824, 557_832), "rmsprop": (147_824, 557_832),
    "adagrad": (147_824, 557_832), "lamb": (295_808, 1_115_824), "lars": (147_984, 557_992),
}  # fmt: skip
"""State of the tiny DistilBERT in 8 and in 32 bit, as the classes of bitsandbytes 0.50.2 allocate it."""
ALL = [entry.name for entry in entries() if entry.package == "bitsandbytes"]


def family_of(name: str) -> str:
    return name.removeprefix("paged-").removesuffix("bit").rstrip("832")


@pytest.mark.parametrize("name", ALL)
def test_tiny_distilbert_takes_the_published_bytes_with_one_table_per_state(name: str) -> None:
    model = tiny_distilbert()
    entry, spec = find(name), OptimSpec(name=name)
    size = measured(entry, model, spec)
    predicted = predict_state(entry, parameter_infos(model), resolve_hyper(entry, spec))
    eight = name.endswith("8bit")
    assert size.state_bytes == predicted.state_bytes == TINY_DISTILBERT_BYTES[family_of(name)][0 if eight else 1]
    tables = 1024 * len({"state1", "state2"} & set(size.tensors)) if eight else 0
    assert size.shared_bytes == predicted.shared_bytes == tables
    assert (predicted.num_quantised, predicted.num_parameters) == (15 if eight else 0, 40)
    assert entry.rule_of_thumb_bytes(139_458, resolve_hyper(entry, spec)) == pytest.approx(size.state_bytes, rel=0.07)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", ["adam8bit", "adamw32bit", "ademamix8bit", "lion32bit", "lars8bit", "paged-lion8bit"])
def test_optim_bits_means_what_it_says_whatever_the_name(name: str, bits: int) -> None:
    model, spec = tiny_distilbert(), OptimSpec(name=name, optim_bits=bits)
    expected = TINY_DISTILBERT_BYTES[family_of(name)][0 if bits == 8 else 1]
    assert measured(find(name), model, spec).state_bytes == expected
    assert predict_state(find(name), parameter_infos(model), resolve_hyper(find(name), spec)).state_bytes == expected


@pytest.mark.parametrize("pattern", ["embed", "*embeddings*", "distilbert.embeddings.*_embeddings.weight"])
def test_embeddings_kept_in_32_bit_take_what_trainer_takes(pattern: str) -> None:
    model = tiny_distilbert()
    entry, spec = find("adam8bit"), OptimSpec(name="adam8bit", keep_32bit=(pattern,))
    assert measured(entry, model, spec).state_bytes == EMBEDDINGS_KEPT
    assert predict_state(entry, parameter_infos(model), resolve_hyper(entry, spec)).state_bytes == EMBEDDINGS_KEPT


@pytest.mark.parametrize("first_kept", [True, False])
def test_two_optimizers_of_one_model_in_one_process_do_not_share_their_overrides(first_kept: bool) -> None:
    model, entry = tiny_distilbert(), find("adam8bit")
    sizes, alive = {}, []
    for kept in (first_kept, not first_kept, first_kept):
        spec = OptimSpec(name="adam8bit", keep_32bit=("embed",) if kept else ())
        alive.append(stepped(entry, model, spec))
        sizes.setdefault(kept, set()).add(inspect_optimizer(alive[-1]).state_bytes)
    assert sizes == {True: {EMBEDDINGS_KEPT}, False: {BARE}}


def test_overrides_that_another_library_left_behind_do_not_bind_ours() -> None:
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    model = tiny_distilbert()
    try:
        manager.override_config(list(model.parameters()), "optim_bits", 32)
        manager.register_parameters(model.parameters())
        manager.register_module_override(model.distilbert.embeddings.word_embeddings, "weight", {"optim_bits": 32})
        assert measured(find("adam8bit"), model, OptimSpec(name="adam8bit")).state_bytes == BARE
    finally:
        manager.initialize()


def test_the_process_wide_overrides_stay_empty() -> None:
    stepped(find("adam8bit"), tiny_distilbert(), OptimSpec(name="adam8bit", keep_32bit=("embed",)))
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    assert not manager.pid2config
    assert not manager.index2config
    assert not manager.module_weight_config_triple


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [((64, 64), 8_320), ((64, 63), 32_256), ((65, 64), 8_456), ((64,), 512)],
)
def test_the_threshold_and_the_last_partial_block_count_as_upstream_has_them(
    shape: tuple[int, ...], num_bytes: int
) -> None:
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.ones(shape))})
    entry, spec = find("adam8bit"), OptimSpec(name="adam8bit")
    size = measured(entry, model, spec)
    predicted = predict_state(entry, parameter_infos(model), resolve_hyper(entry, spec))
    assert size.by_parameter == predicted.by_parameter == {"weight": num_bytes}
    assert size.state_bytes == predicted.state_bytes == num_bytes + (2_048 if predicted.num_quantised else 0)


def test_the_smallest_8bit_size_is_the_one_given() -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    for size, num_bytes in ((4096, 8_320 + 2_048), (4097, 32_768)):
        spec = OptimSpec(name="adamw8bit", min_8bit_size=size)
        assert measured(find("adamw8bit"), model, spec).state_bytes == num_bytes


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("paged")])
def test_paged_state_is_the_same_on_a_cpu_and_placed_in_paged_memory_on_a_gpu(name: str) -> None:
    entry, spec = find(name), OptimSpec(name=name)
    model = torch.nn.ModuleDict({"big": torch.nn.Linear(320, 320), "small": torch.nn.Linear(64, 64)})
    optimizer = stepped(entry, model, spec)
    optimizer.step()
    predicted = predict_state(entry, parameter_infos(model), resolve_hyper(entry, spec))
    size = inspect_optimizer(optimizer)
    unpaged = inspect_optimizer(stepped(find(name.removeprefix("paged-")), model, spec))
    assert size.state_bytes == predicted.state_bytes == unpaged.state_bytes
    statistics = sum(amount.elements for key, amount in size.tensors.items() if key != "step") / size_of(model)
    width = 1 if name.endswith("8bit") else 4
    assert predicted.placements[Placement.PAGED] == width * statistics * 320 * 320
    assert "CPU" in (entry.cpu_note or "")


def size_of(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def test_code_tables_are_shared_again_after_a_load_that_copied_them() -> None:
    model, entry, spec = tiny_distilbert(), find("adam8bit"), OptimSpec(name="adam8bit")
    saved = stepped(entry, model, spec).state_dict()
    for state in saved["state"].values():  # as moving to a GPU does, tensor by tensor
        nested = state["__bnb_optimizer_quant_state__"]
        nested |= {key: nested[key].clone() for key in ("qmap1", "qmap2") if key in nested}
    resumed = stepped(entry, model, spec)
    resumed.load_state_dict(copy.deepcopy(saved))
    assert inspect_optimizer(resumed).state_bytes == BARE + 14 * 2 * 1024
    model.distilbert.embeddings.word_embeddings.weight.grad = None
    resumed.step()
    assert inspect_optimizer(resumed).state_bytes == BARE


def test_state_stays_in_8_bit_through_accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model, entry = tiny_distilbert(), find("adam8bit")
    hyper = resolve_hyper(entry, OptimSpec(name="adam8bit", keep_32bit=("embed",)))
    try:
        model, optimizer = Accelerator(cpu=True).prepare(model, entry.build(decay_groups(model, 0.01), hyper))
        set_gradients(model)
        optimizer.step()
        assert inspect_optimizer(optimizer).state_bytes == EMBEDDINGS_KEPT
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
