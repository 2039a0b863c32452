"""8-bit optimizers: which states are 8 bit, isolation between optimizers, decay."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch

from effcli.errors import UsageError
from effcli.measure.optimizer_size import inspect_optimizer
from effcli.memory.state import predict_state
from effcli.optim.groups import decay_groups
from effcli.optim.registry import find, resolve_hyper
from effcli.spec import OptimSpec
from effcli.units import Placement
from tests.tiny_models import infos, measured, set_gradients, stepped, tiny_distilbert

BARE, EMBEDDINGS_KEPT = 295_648, 702_096
EIGHT_BIT = ["adam8bit", "adamw8bit", "paged-adamw8bit"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_distilbert_takes_the_published_bytes_with_one_pair_of_code_tables(name: str, dtype: torch.dtype) -> None:
    model = tiny_distilbert().to(dtype)
    entry, spec = find(name), OptimSpec(name=name)
    size = measured(entry, model, spec)
    predicted = predict_state(entry, infos(model), resolve_hyper(entry, spec))
    assert size.state_bytes == predicted.state_bytes == BARE
    assert size.shared_bytes == predicted.shared_bytes == 2 * 1024
    assert (predicted.num_quantised, predicted.num_parameters) == (15, 40)


@pytest.mark.parametrize("pattern", ["embed", "*embeddings*", "distilbert.embeddings.*_embeddings.weight"])
def test_embeddings_kept_in_32_bit_take_what_trainer_takes(pattern: str) -> None:
    model = tiny_distilbert()
    entry, spec = find("adam8bit"), OptimSpec(name="adam8bit", keep_32bit=(pattern,))
    assert measured(entry, model, spec).state_bytes == EMBEDDINGS_KEPT
    assert predict_state(entry, infos(model), resolve_hyper(entry, spec)).state_bytes == EMBEDDINGS_KEPT


def test_a_pattern_that_fits_nothing_is_refused_before_and_at_the_build() -> None:
    model = tiny_distilbert()
    entry = find("adam8bit")
    hyper = resolve_hyper(entry, OptimSpec(name="adam8bit", keep_32bit=("embed", "lm_head*")))
    for call in (lambda: predict_state(entry, infos(model), hyper), lambda: entry.build(decay_groups(model, 0), hyper)):
        with pytest.raises(UsageError, match=r"--keep-32bit 'lm_head\*' fits no trainable parameter"):
            call()


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
    predicted = predict_state(entry, infos(model), resolve_hyper(entry, spec))
    assert size.by_parameter == predicted.by_parameter == {"weight": num_bytes}
    assert size.state_bytes == predicted.state_bytes == num_bytes + (2_048 if predicted.num_quantised else 0)


def test_a_model_of_small_tensors_saves_nothing_and_the_summary_says_why() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(63, 64, bias=False) for _ in range(3))
    entry = find("adam8bit")
    predicted = predict_state(entry, infos(model), resolve_hyper(entry, OptimSpec(name="adam8bit")))
    adamw = predict_state(find("adamw"), infos(model), find("adamw").defaults)
    assert predicted.state_bytes == 3 * 32_256 == adamw.state_bytes - 3 * 4
    assert (predicted.num_quantised, predicted.shared_bytes) == (0, 0)


def test_the_smallest_8bit_size_is_the_one_given() -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    for size, num_bytes in ((4096, 8_320 + 2_048), (4097, 32_768)):
        spec = OptimSpec(name="adamw8bit", min_8bit_size=size)
        assert measured(find("adamw8bit"), model, spec).state_bytes == num_bytes


def test_paged_state_is_the_same_on_a_cpu_and_placed_in_paged_memory_on_a_gpu() -> None:
    entry, spec = find("paged-adamw8bit"), OptimSpec(name="paged-adamw8bit")
    model = torch.nn.ModuleDict({"big": torch.nn.Linear(320, 320), "small": torch.nn.Linear(64, 64)})
    optimizer = stepped(entry, model, spec)
    optimizer.step()
    predicted = predict_state(entry, infos(model), resolve_hyper(entry, spec))
    assert inspect_optimizer(optimizer).state_bytes == predicted.state_bytes
    assert predicted.placements[Placement.PAGED] == 2 * 320 * 320
    assert "CPU" in (entry.cpu_note or "")


@pytest.mark.parametrize("name", EIGHT_BIT)
@pytest.mark.parametrize("num_elements", [16, 4096])
def test_decay_acts_on_the_weight_as_in_adamw_and_not_through_the_gradient(name: str, num_elements: int) -> None:
    ends = {}
    for key in (name, "adamw"):
        param = torch.nn.Parameter(torch.full((num_elements,), 2.0))
        groups = [{"params": [param], "names": ["weight"], "weight_decay": 0.5}]
        optimizer = find(key).build(groups, resolve_hyper(find(key), OptimSpec(name=key, lr=0.1)))
        for sign in (1.0, -1.0):
            param.grad = torch.full_like(param, 0.1 * sign)
            optimizer.step()
        ends[key] = param[0].item()
    assert ends[name] == pytest.approx(ends["adamw"], rel=1e-5)
    assert ends["adamw"] < 1.75  # L2 decay would leave it near 1.80


def test_the_upstream_class_refuses_what_the_entry_does_not_offer() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="amsgrad"):
        bitsandbytes.optim.Adam8bit([param], amsgrad=True)
    with pytest.raises(TypeError):
        bitsandbytes.optim.Adam8bit([param], percentile_clipping=5)


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
