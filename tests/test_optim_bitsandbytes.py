"""bitsandbytes' optimizers: the upstream class they stand for, which states are 8 bit, isolation, decay."""

from __future__ import annotations

import ast
import copy
from importlib.util import find_spec
from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes.optim.ademamix import _ReferenceAdEMAMix
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from effcli.errors import DeviceError, UsageError
from effcli.measure.optimizer_size import inspect_optimizer
from effcli.memory.state import predict_state
from effcli.optim.groups import decay_groups
from effcli.optim.registry import check_works, entries, find, resolve_hyper
from effcli.spec import OptimSpec
from effcli.units import Placement
from tests.tiny_models import infos, measured, set_gradients, stepped, tiny_distilbert

BARE, EMBEDDINGS_KEPT = 295_648, 702_096
F1_BYTES = {
    "adam": (295_648, 1_115_664), "adamw": (295_648, 1_115_664), "lion": (147_824, 557_832),
    "ademamix": (442_448, 1_673_496), "sgd": (147_824, 557_832), "rmsprop": (147_824, 557_832),
    "adagrad": (147_824, 557_832), "lamb": (295_808, 1_115_824), "lars": (147_984, 557_992),
}  # fmt: skip
"""State of the tiny DistilBERT in 8 and in 32 bit, as the classes of bitsandbytes 0.50.2 allocate it."""
CLASSES = {
    "adam": "Adam", "adamw": "AdamW", "lion": "Lion", "ademamix": "AdEMAMix", "sgd": "SGD", "rmsprop": "RMSprop",
    "adagrad": "Adagrad", "lamb": "LAMB", "lars": "LARS",
}  # fmt: skip
ARGUMENTS = {
    "adam": {"betas": (0.8, 0.9), "eps": 1e-6},
    "adamw": {"betas": (0.8, 0.9), "eps": 1e-6},
    "lion": {"betas": (0.8, 0.9)},
    "ademamix": {"betas": (0.8, 0.9, 0.99), "eps": 1e-6, "alpha": 3.0, "t_alpha": 4, "t_beta3": 5},
    "sgd": {"momentum": 0.7},
    "rmsprop": {"alpha": 0.8, "eps": 1e-6},
    "adagrad": {"eps": 1e-6},
    "lamb": {"betas": (0.8, 0.9), "eps": 1e-6},
    "lars": {"momentum": 0.7, "max_unorm": 0.5},
}
ALL = [entry.name for entry in entries() if entry.package == "bitsandbytes"]
DECOUPLED = {"adam", "adamw", "lion", "ademamix", "lamb"}


def family_of(name: str) -> str:
    return name.removeprefix("paged-").removesuffix("bit").rstrip("832")


def spec_of(name: str, **settings) -> OptimSpec:
    """Return the specification that says what `ARGUMENTS` says to upstream's class."""
    given = dict(ARGUMENTS[family_of(name)])
    given |= {f"beta{number}": beta for number, beta in enumerate(given.pop("betas", ()), start=1)}
    return OptimSpec(name=name, args=given, **settings)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((65, 64), (4095,), (40, 30, 4))]


def updated(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return [param.detach() for param in params]


def build(spec: OptimSpec, params: list[torch.nn.Parameter], weight_decay: float = 0.0) -> torch.optim.Optimizer:
    entry = find(spec.name)
    return entry.build([{"params": params, "weight_decay": weight_decay}], resolve_hyper(entry, spec))


def test_every_family_is_there_in_8_and_32_bit_and_paged_where_upstream_has_it() -> None:
    plain = {f"{family}{bits}bit" for family in CLASSES for bits in (8, 32)}
    paged = {f"paged-{family}{bits}bit" for family in ("adam", "adamw", "lion", "ademamix") for bits in (8, 32)}
    assert set(ALL) == plain | paged
    upstream = {name for name in dir(bitsandbytes.optim) if name.startswith("Paged") and name.endswith("bit")}
    assert len(paged) == len(upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_an_entry_updates_and_keeps_what_upstreams_class_of_its_name_does(name: str, dtype: torch.dtype) -> None:
    family, bits = family_of(name), 8 if name.endswith("8bit") else 32
    class_name = CLASSES[family] if family == "ademamix" else f"{CLASSES[family]}{bits}bit"
    more = {"optim_bits": bits} if family == "ademamix" else {}  # AdEMAMix32bit cannot step, see below
    ours, theirs = parameters(dtype), parameters(dtype)
    upstream = getattr(bitsandbytes.optim, class_name)(theirs, lr=1e-2, weight_decay=0.1, **ARGUMENTS[family], **more)
    optimizer = build(spec_of(name, lr=1e-2), ours, 0.1)
    for one, other in zip(updated(optimizer, ours), updated(upstream, theirs), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(ours, theirs, strict=True):
        state, expected = optimizer.state[one], upstream.state[other]
        assert list(state) == list(expected)
        for key, value in expected.items():
            assert torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value


def test_ademamix_in_32_bit_is_the_algorithm_of_its_paper() -> None:
    ours, theirs = parameters()[:1], parameters()[:1]
    reference = _ReferenceAdEMAMix(theirs, lr=1e-2, weight_decay=0.1, **ARGUMENTS["ademamix"])
    pairs = zip(
        updated(build(spec_of("ademamix32bit", lr=1e-2), ours, 0.1), ours), updated(reference, theirs), strict=True
    )
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)


def test_upstreams_ademamix32bit_still_lacks_its_double_state() -> None:
    param = torch.nn.Parameter(torch.ones(8, 8))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="broadcast"):
        bitsandbytes.optim.AdEMAMix32bit([param]).step()


@pytest.mark.parametrize("name", ALL)
def test_distilbert_takes_the_published_bytes_with_one_table_per_state(name: str) -> None:
    model = tiny_distilbert()
    entry, spec = find(name), OptimSpec(name=name)
    size = measured(entry, model, spec)
    predicted = predict_state(entry, infos(model), resolve_hyper(entry, spec))
    eight = name.endswith("8bit")
    assert size.state_bytes == predicted.state_bytes == F1_BYTES[family_of(name)][0 if eight else 1]
    tables = 1024 * len({"state1", "state2"} & set(size.tensors)) if eight else 0
    assert size.shared_bytes == predicted.shared_bytes == tables
    assert (predicted.num_quantised, predicted.num_parameters) == (15 if eight else 0, 40)
    assert entry.rule_of_thumb_bytes(139_458, resolve_hyper(entry, spec)) == pytest.approx(size.state_bytes, rel=0.07)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", ["adam8bit", "adamw32bit", "ademamix8bit", "lion32bit", "lars8bit", "paged-lion8bit"])
def test_optim_bits_means_what_it_says_whatever_the_name(name: str, bits: int) -> None:
    model, spec = tiny_distilbert(), OptimSpec(name=name, optim_bits=bits)
    expected = F1_BYTES[family_of(name)][0 if bits == 8 else 1]
    assert measured(find(name), model, spec).state_bytes == expected
    assert predict_state(find(name), infos(model), resolve_hyper(find(name), spec)).state_bytes == expected


@pytest.mark.parametrize("pattern", ["embed", "*embeddings*", "distilbert.embeddings.*_embeddings.weight"])
def test_embeddings_kept_in_32_bit_take_what_trainer_takes(pattern: str) -> None:
    model = tiny_distilbert()
    entry, spec = find("adam8bit"), OptimSpec(name="adam8bit", keep_32bit=(pattern,))
    assert measured(entry, model, spec).state_bytes == EMBEDDINGS_KEPT
    assert predict_state(entry, infos(model), resolve_hyper(entry, spec)).state_bytes == EMBEDDINGS_KEPT


TRAINER_NAMES = [
    name.value
    for name in OptimizerNames
    if "galore" not in name.value and ("bnb" in name.value or "_8bit" in name.value or "_32bit" in name.value)
] + ["ademamix"]


@pytest.mark.parametrize("word", [word for word in TRAINER_NAMES if not word.startswith("adamw_torch")])
def test_the_names_of_trainer_find_what_trainer_builds(word: str, tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), optim=word, use_cpu=True, report_to="none")
    upstream_class, upstream_arguments = Trainer.get_optimizer_cls_and_kwargs(arguments)
    entry = find(word)
    betas = dict(zip(("beta1", "beta2", "beta3"), upstream_arguments.get("betas", ()), strict=False))
    spec = OptimSpec(name=word, lr=1e-3, args={key: beta for key, beta in betas.items() if key in entry.defaults})
    ours, theirs = parameters(), parameters()
    optimizer, upstream = (
        build(spec, ours),
        upstream_class(theirs, **upstream_arguments | {"lr": 1e-3, "weight_decay": 0.0}),
    )
    upstream._cpu_paged_warned = True
    for one, other in zip(updated(optimizer, ours), updated(upstream, theirs), strict=True):
        assert torch.equal(one, other)
    assert inspect_optimizer(optimizer).tensors == inspect_optimizer(upstream).tensors
    assert entry.name.startswith("paged") is upstream.is_paged


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
    predicted = predict_state(entry, infos(model), resolve_hyper(entry, spec))
    size = inspect_optimizer(optimizer)
    unpaged = inspect_optimizer(stepped(find(name.removeprefix("paged-")), model, spec))
    assert size.state_bytes == predicted.state_bytes == unpaged.state_bytes
    statistics = sum(amount.elements for key, amount in size.tensors.items() if key != "step") / size_of(model)
    width = 1 if name.endswith("8bit") else 4
    assert predicted.placements[Placement.PAGED] == width * statistics * 320 * 320
    assert "CPU" in (entry.cpu_note or "")


def size_of(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("num_elements", [16, 4096])
@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("paged")])
def test_decay_acts_on_the_weight_or_on_the_gradient_as_the_summary_says(name: str, num_elements: int) -> None:
    param = torch.nn.Parameter(torch.full((num_elements,), 2.0))
    optimizer = build(OptimSpec(name=name, lr=0.1), [param], weight_decay=0.5)
    for _ in range(2):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    alone = 2.0 * (1 - 0.1 * 0.5) ** 2  # what shrinking the weight gives; through a gradient, momentum or scale come in
    decoupled = param[0].item() == pytest.approx(alone, rel=1e-6)
    assert decoupled is (family_of(name) in DECOUPLED)
    assert ("added to the gradient" in find(name).summary) <= (not decoupled)


@pytest.mark.parametrize(("limited", "plain"), [("lamb", "adam"), ("lars", "sgd")])
def test_a_limit_on_the_updates_norm_counts_in_32_bit_alone(limited: str, plain: str) -> None:
    moved = {}
    for name in (f"{limited}8bit", f"{limited}32bit", f"{plain}8bit", f"{plain}32bit"):
        param = torch.nn.Parameter(torch.zeros(64, 64))
        updated(build(OptimSpec(name=name, lr=1e-2), [param]), [param])
        moved[name] = param.detach()
    assert torch.equal(moved[f"{limited}8bit"], moved[f"{plain}8bit"])
    assert not moved[f"{limited}32bit"].any()  # zeros have norm zero, and so has the largest allowed update
    assert moved[f"{plain}32bit"].all()
    param = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = build(OptimSpec(name=f"{limited}32bit", lr=1e-2, args={"max_unorm": 0}), [param])
    assert torch.equal(updated(optimizer, [param])[0], moved[f"{plain}32bit"])
    assert "unorm_vec" not in optimizer.state[param]


def test_lamb_and_lars_in_8_bit_are_kept_from_cuda_which_has_no_kernel_of_their_name() -> None:
    source = Path(find_spec("bitsandbytes").submodule_search_locations[0]) / "backends" / "cuda" / "ops.py"
    (table,) = (
        node.value
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "str2optimizer8bit_blockwise"
    )
    kernels = {ast.literal_eval(key) for key in table.keys}
    names = {"adamw": "adam", "sgd": "momentum"}
    for name in ALL:
        missing = name.endswith("8bit") and names.get(family_of(name), family_of(name)) not in kernels
        assert find(name).devices == (("cpu",) if missing else ("cpu", "cuda")), name
    with pytest.raises(DeviceError, match="'lamb8bit' does not run on cuda, only on cpu"):
        check_works(find("lamb8bit"), "cuda")


@pytest.mark.parametrize("kernel", ["optimizer_update_32bit", "optimizer_update_8bit_blockwise"])
def test_a_kernel_that_lacks_the_dtype_of_the_weights_is_found_out_before_a_model_is_loaded(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = getattr(bitsandbytes.functional, kernel)

    def no_bfloat16(name, gradient, *rest, **more) -> None:
        if gradient.dtype == torch.bfloat16:
            raise ValueError("Gradient+optimizer bit data type combination not supported")
        working(name, gradient, *rest, **more)

    monkeypatch.setattr(bitsandbytes.functional, kernel, no_bfloat16)
    check_works(find("sgd8bit"))
    with pytest.raises(DeviceError, match="with bfloat16 weights: Gradient"):
        check_works(find("sgd8bit"), dtype="bfloat16")


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


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("sgd8bit", {"args": {"momentum": 0}}, ["sgd8bit needs momentum above 0", "--optim sgd"]),
        ("lars32bit", {"args": {"momentum": 0}}, ["lars32bit needs momentum above 0"]),
        ("sgd8bit", {"args": {"dampening": 0.1}}, ["takes no 'dampening'"]),
        ("rmsprop8bit", {"args": {"alpha": 0}}, ["'alpha' of 'rmsprop8bit' must be above 0 and below 1"]),
        ("rmsprop8bit", {"args": {"alpha": 1}}, ["'alpha' of 'rmsprop8bit' must be above 0 and below 1"]),
        ("rmsprop8bit", {"args": {"centered": True}}, ["takes no 'centered'"]),
        ("adagrad8bit", {"args": {"initial_accumulator_value": 0.1}}, ["takes no 'initial_accumulator_value'"]),
        ("adagrad8bit", {"args": {"lr_decay": 0.1}}, ["takes no 'lr_decay'"]),
        ("adam8bit", {"args": {"amsgrad": True}}, ["takes no 'amsgrad'"]),
        ("lion8bit", {"eps": 1e-6}, ["takes no --eps"]),
        ("lamb8bit", {"args": {"max_unorm": -1}}, ["'max_unorm'", "at least 0"]),
        ("ademamix8bit", {"args": {"beta3": 1}}, ["'beta3'", "at least 0 and below 1"]),
        ("ademamix8bit", {"args": {"t_alpha": 0}}, ["'t_alpha'", "above 0"]),
        ("ademamix8bit", {"beta1": 0.0, "args": {"t_beta3": 9}}, ["t_beta3 needs 0 < beta1 <= beta3", "drop t_beta3"]),
        ("ademamix8bit", {"args": {"t_beta3": 9, "beta3": 0.5}}, ["t_beta3 needs 0 < beta1 <= beta3"]),
    ],
)
def test_what_upstream_refuses_or_ignores_is_refused_before_anything_is_loaded(
    name: str, settings: dict, words: list[str]
) -> None:
    with pytest.raises(UsageError) as error:
        resolve_hyper(find(name), OptimSpec(name=name, **settings))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_the_upstream_classes_still_refuse_and_ignore_what_the_entries_do_not_offer() -> None:
    param = torch.nn.Parameter(torch.ones(64, 64))
    with pytest.raises(ValueError, match="amsgrad"):
        bitsandbytes.optim.Adam8bit([param], amsgrad=True)
    with pytest.raises(TypeError):
        bitsandbytes.optim.Adam8bit([param], percentile_clipping=5)
    pinned = bitsandbytes.optim.Adam8bit([param], optim_bits=32)
    param.grad = torch.ones_like(param)
    pinned.step()
    assert pinned.state[param]["state1"].dtype == torch.uint8


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
