"""bitsandbytes' optimizers: the upstream class they stand for, its updates, its kernels, what it refuses."""

from __future__ import annotations

import ast
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
from effcli.optim.registry import check_works, entries, find, resolve_hyper
from effcli.spec import OptimSpec

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
