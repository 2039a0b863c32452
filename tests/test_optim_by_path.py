"""Any optimizer class by its path: its hyperparameters, its errors, and its state sized by stepping it on stand-ins."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import F1, csv_file, effcli, model_folder

from effcli.errors import EffcliError, MissingExtraError, UsageError
from effcli.measure.optimizer_size import OptimizerSize, inspect_optimizer
from effcli.memory.state import StateSummary, predict_state
from effcli.optim import probing
from effcli.optim.groups import decay_groups
from effcli.optim.hyper import default_hyper, resolve_hyper
from effcli.optim.registry import check_works, find
from effcli.optim.scaling import LARGEST, stand_ins
from effcli.spec import OptimSpec
from effcli.units import Basis, ParamInfo, Placement
from tests.tiny_models import infos, set_gradients, tiny_distilbert

F1_STATE = {
    "torch.optim:AdamW": 1_115_824,
    "torch.optim:SGD": 0,
    "torch.optim:Adafactor": 19_280,
    "transformers.optimization:Adafactor": 19_280,
    "bitsandbytes.optim:Adam": 8 * 139_458,
    "torchao.optim:AdamW8bit": 324_480,
}
"""Class -> bytes on F1, known from elsewhere."""
OTHERS = (
    "schedulefree:AdamWScheduleFree",
    "galore_torch:GaLoreAdamW",
    "pytorch_optimizer:CAME",
    "pytorch_optimizer:Lamb",  # views of one tensor with a number for each parameter
    "pytorch_optimizer:MADGRAD",  # a counter that belongs to the whole optimizer
    "pytorch_optimizer:Shampoo",
)
HERE = "tests.test_optim_by_path"


def message(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def both(path: str, model: torch.nn.Module, spec: OptimSpec | None = None) -> tuple[StateSummary, OptimizerSize]:
    """Return the probed state of a class on a model, and what its own instance holds after one step."""
    pytest.importorskip(path.partition(".")[0].partition(":")[0])
    entry = find(path)
    hyper = resolve_hyper(entry, spec or OptimSpec())
    predicted = predict_state(entry, infos(model), hyper)
    set_gradients(model)
    optimizer = entry.build(decay_groups(model, 0.01), hyper)
    with torch.compiler.set_stance("force_eager"):  # compiling torchao's step takes tens of seconds
        optimizer.step()
    return predicted, inspect_optimizer(optimizer)


@pytest.mark.parametrize("path", [*F1_STATE, *OTHERS])
def test_the_probed_state_of_a_small_model_is_the_real_one_key_by_key(path: str) -> None:
    quiet = OptimSpec(args={"no_deprecation_warning": True}) if "galore" in path else None
    predicted, measured = both(path, tiny_distilbert(), quiet)
    assert predicted.basis is Basis.PROBED
    assert predicted.tensors == measured.tensors
    assert predicted.state_bytes == measured.state_bytes == F1_STATE.get(path, measured.state_bytes)
    assert predicted.state_elements == measured.state_elements


@pytest.mark.parametrize(
    "path", ["torch.optim:AdamW", "transformers.optimization:Adafactor", "torchao.optim:AdamW8bit"]
)
def test_half_precision_weights_are_probed_in_their_dtype(path: str) -> None:
    predicted, measured = both(path, tiny_distilbert().bfloat16())
    assert predicted.tensors == measured.tensors


def test_code_tables_of_8_bit_states_are_known_to_be_shared() -> None:
    predicted, measured = both("bitsandbytes.optim:AdEMAMix8bit", tiny_distilbert())
    assert predicted.tensors == measured.tensors
    predicted, measured = both("bitsandbytes.optim:Adam8bit", tiny_distilbert(), OptimSpec(args={"min_8bit_size": 64}))
    assert predicted.tensors == measured.tensors
    assert predicted.by_parameter == measured.by_parameter
    assert predicted.shared_bytes == 2048
    assert predicted.num_quantised > 15  # so many with upstream's 4,096


class Large(torch.nn.Module):
    """Parameters that all need a stand-in, none of them a multiple of the blocks of 256."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for index, shape in enumerate([(2301, 1411), (LARGEST + 1030,), (40, 210, 200)]):
            param = torch.nn.Parameter(0.02 * torch.randn(shape).to(dtype))
            assert param.numel() > LARGEST
            self.register_parameter(f"p{index}", param)


class Steps(torch.optim.Optimizer):
    """What the classes below have in common: they allocate at the first step and leave the weights alone."""

    def __init__(self, params: object, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.allocate(param, self.state[param])

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        raise NotImplementedError


class LongAxis(Steps):
    """Keeps one square for each axis of at most 1,400: no law in the shape."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        state["squares"] = [param.new_zeros(size, size) for size in param.shape if size <= 1400]


class ReadsFirst(Steps):
    """Reads a value before it allocates a factor, blocks and a constant, so that it tells nothing without data."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        assert float(param.grad.sum()) != 0
        state["rows"] = param.new_zeros(param.shape[:-1])
        state["absmax"] = param.new_zeros(math.ceil(param.numel() / 256))
        state["moment"] = torch.zeros_like(param, dtype=torch.float16)
        state["three"] = torch.zeros(3, dtype=torch.float64)


class ReadsSquares(Steps):
    """Reads a value first and grows with the square of the last axis."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        assert float(param.grad.sum()) != 0
        state["square"] = torch.zeros(param.shape[-1], param.shape[-1], dtype=torch.uint8)


class Fickle(Steps):
    """Keeps as many elements as there are large gradients."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        state["large"] = param.grad[param.grad > 1]


class OnHost(Steps):
    """Keeps one state beside the weight and one on the host."""

    def allocate(self, param: torch.Tensor, state: dict[str, object]) -> None:
        state["near"], state["far"], state["step"] = torch.zeros_like(param), torch.zeros(param.shape), 1


@pytest.mark.parametrize(
    "path",
    [
        "torch.optim:AdamW",
        "torch.optim:Adafactor",
        "bitsandbytes.optim:AdamW8bit",
        "torchao.optim:AdamW4bit",
        "transformers.optimization:Adafactor",
        "pytorch_optimizer:CAME",
        "pytorch_optimizer:AdaGC",  # reads a value before all is allocated
        f"{HERE}:LongAxis",
        f"{HERE}:ReadsFirst",
    ],
)
def test_the_probed_state_of_large_parameters_is_the_real_one_to_the_byte(path: str) -> None:
    predicted, measured = both(path, Large())
    assert predicted.tensors == measured.tensors
    assert predicted.state_elements == measured.state_elements


def test_a_state_that_follows_no_law_is_probed_at_the_real_size_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Module()
    model.p = torch.nn.Parameter(torch.randn(700, 2400))
    predicted, measured = both(f"{HERE}:ReadsSquares", model)
    assert predicted.tensors == measured.tensors
    assert predicted.state_bytes == 2400**2

    monkeypatch.setattr(probing, "_LARGEST_REAL", LARGEST)
    with pytest.raises(UsageError, match=r"ReadsSquares' cannot be sized for float32 weights 700 x 2401: .*too large"):
        probe(f"{HERE}:ReadsSquares", (700, 2401))


def probe(path: str, shape: tuple[int, ...], spec: OptimSpec | None = None, dtype: str = "float32") -> StateSummary:
    entry = find(path)
    return predict_state(
        entry, [ParamInfo(name="w", shape=shape, dtype=dtype)], resolve_hyper(entry, spec or OptimSpec())
    )


def test_a_state_that_depends_on_values_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        probe(f"{HERE}:Fickle", (64, 64))
    assert "64 x 64" in message(error)
    assert "differs between two parameters" in message(error)


def test_a_parameter_too_large_for_any_memory_is_sized() -> None:
    assert probe("torch.optim:AdamW", (200_000, 100_000)).state_bytes == 8 * 2 * 10**10 + 4
    eight = probe("bitsandbytes.optim:AdEMAMix8bit", (200_000, 100_000))
    assert eight.state_bytes == 3 * (2 * 10**10 + 4 * (2 * 10**10 // 256)) + 2 * 1024
    assert probe("torch.optim:Adafactor", (200_000, 100_000), dtype="bfloat16").state_bytes == 2 * 300_000 + 4


def test_what_lies_on_the_host_is_found_out() -> None:
    adamw = probe("torch.optim:AdamW", (10,))
    assert adamw.placements == {Placement.HOST: 4, Placement.DEVICE: 80}
    assert probe(f"{HERE}:OnHost", (10,)).placements == {Placement.HOST: 40, Placement.DEVICE: 40}
    assert probe(f"{HERE}:OnHost", (2000, 1000)).placements == {Placement.HOST: 8 * 10**6, Placement.DEVICE: 8 * 10**6}


def test_stand_ins_are_small_and_keep_what_block_laws_depend_on() -> None:
    for shape in [
        (28_996, 768),
        (1301, 1411),
        (1025, 1024),
        (2, 700_001),
        (LARGEST + 1030,),
        (64, 4096, 14_336),
        (1024, 1024, 3, 3),
    ]:
        small = stand_ins(shape)
        for one in (*small.corners(), small.third):
            assert all(length <= whole for length, whole in zip(one, shape, strict=True))
            assert math.prod(one) % 256 == math.prod(shape) % 256
            assert 65_536 < math.prod(one) < 6_000_000
        assert len(small.corners()) <= 2 ** len(shape)
        assert small.first != shape


def test_probing_disturbs_no_random_numbers_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    probe("torch.optim:Rprop", (33, 7))
    assert torch.equal(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")


def test_hyperparameters_are_those_of_the_signature_with_betas_and_eps_apart() -> None:
    entry = find(" torch.optim:AdamW ")
    assert entry.name == "torch.optim:AdamW"
    assert {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}.items() <= entry.defaults.items()
    assert not {"betas", "weight_decay", "params"} & set(entry.defaults)
    assert entry.takes_weight_decay
    assert "torch/optim/adamw.py" in entry.source
    assert (find("torch.optim:Adafactor").defaults["eps"], find("torch.optim:Adafactor").defaults["eps2"]) == (
        None,
        1e-3,
    )
    assert find("bitsandbytes.optim:AdEMAMix").defaults["beta3"] == 0.9999
    assert not find("torch.optim:Rprop").takes_weight_decay

    spec = OptimSpec(lr=1, beta1=0.5, eps=1e-3, args={"amsgrad": "true", "foreach": False})
    group = build("torch.optim:AdamW", spec)
    assert (group["lr"], group["betas"], group["eps"]) == (1.0, (0.5, 0.999), 1e-3)
    assert (group["amsgrad"], group["foreach"]) == (True, False)
    rprop = build("torch.optim:Rprop", OptimSpec(args={"etas": "0.25, 1.5"}))
    assert (rprop["etas"], rprop["step_sizes"]) == ((0.25, 1.5), (1e-6, 50))
    assert build("torch.optim:SGD", OptimSpec(args={"momentum": 0.5}))["momentum"] == 0.5  # upstream's default is 0
    eight = resolve_hyper(find("bitsandbytes.optim:RMSprop"), OptimSpec(optim_bits=8, min_8bit_size=64))
    assert (eight["optim_bits"], eight["min_8bit_size"]) == (8, 64)


def build(path: str, spec: OptimSpec) -> dict[str, object]:
    """Return the options of the group of one parameter."""
    entry = find(path)
    optimizer = entry.build(
        [{"params": [torch.nn.Parameter(torch.ones(4))], "weight_decay": 0.3}], resolve_hyper(entry, spec)
    )
    return optimizer.param_groups[0]


class Inherits(torch.optim.AdamW):
    """Passes its keywords on; its own default of the decay must reach no group that has none."""

    def __init__(self, params: object, *, lr: float = 0.5, weight_decay: float = 0.9, **keywords: object) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, **keywords)


def test_what_a_class_passes_on_is_accepted_and_its_decay_spares_biases_and_norms() -> None:
    path = f"{HERE}:Inherits"
    assert find(path).defaults["lr"] == 0.5
    assert find(path).defaults["amsgrad"] is False
    model = tiny_distilbert()
    optimizer = find(path).build(decay_groups(model, 0.1), default_hyper(find(path)))
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [(0.1, 16), (0.0, 24)]
    assert optimizer.defaults["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("path", "spec", "words"),
    [
        ("torch.optim:AdamW", OptimSpec(args={"amsgrd": True}), ["takes no 'amsgrd'", "Did you mean 'amsgrad'?"]),
        ("torch.optim:AdamW", OptimSpec(args={"weight_decay": 1}), ["--weight-decay"]),
        ("torch.optim:AdamW", OptimSpec(args={"amsgrad": "maybe"}), ["'amsgrad'", "true or false", "'maybe'"]),
        ("torch.optim:Rprop", OptimSpec(args={"etas": "0.5"}), ["'etas'", "numbers with commas, 2 of them"]),
        ("torch.optim:Rprop", OptimSpec(args={"etas": "a,b"}), ["'etas'", "numbers with commas"]),
        ("torch.optim:Rprop", OptimSpec(weight_decay=0.1), ["--weight-decay 0.1", "no weight decay"]),
        ("torch.optim:AdamW", OptimSpec(lr=1e-3, args={"lr": 1}), ["'lr' is given twice"]),
        ("bitsandbytes.optim:Adam", OptimSpec(keep_32bit=("embed",)), ["--keep-32bit embed", "listed optimizers"]),
        (
            "bitsandbytes.optim:Adam",
            OptimSpec(min_8bit_size=64, args={"min_8bit_size": 1}),
            ["'min_8bit_size' is given twice", "--min-8bit-size 64"],
        ),
        ("bitsandbytes.optim:SGD", OptimSpec(args={"momentum": 0.9}), ["needs 'lr', which has no default", "--lr"]),
        ("transformers.optimization:Adafactor", OptimSpec(lr=1e-3), ["refuses what it is given", "relative_step"]),
        ("torch.optim:AdamW", OptimSpec(args={"fused": "often", "foreach": True}), ["refuses", "fused"]),
        ("torch.optim:Adadelta", OptimSpec(args={"rho": 2}), ["refuses what it is given", "rho"]),
    ],
)
def test_a_wrong_hyperparameter_is_refused_in_one_line(path: str, spec: OptimSpec, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        check_works(find(path), hyper=resolve_hyper(find(path), spec))
    text = message(error)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("torch.optim:AdamX", ["'torch.optim' has no 'AdamX'", "Did you mean 'Adam"]),
        ("torch.optmi:AdamW", ["'torch' has no module 'optmi'", "Did you mean 'torch.optim'?"]),
        ("torch.optim:lr_scheduler", ["is no optimizer class"]),
        ("torch.optim:Optimizer", ["is no optimizer class"]),
        ("json:JSONDecoder", ["'json:JSONDecoder' is no optimizer class", "its optimizers are none"]),
        ("torch optim:AdamW", ["is no path of a class", "torch.optim:AdamW"]),
        ("torch.optim:", ["is no path of a class"]),
        (":AdamW", ["is no path of a class"]),
        ("torch.optim:LBFGS", ["needs 'closure' at each step"]),
    ],
)
def test_a_path_that_leads_to_no_optimizer_says_so_in_one_line(path: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        find(path)
    text = message(error)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("torch.optim:SparseAdam", ["cannot make a step from gradients alone", "dense gradients"]),
        (f"{HERE}:WithoutRate", ["has no 'lr' in its parameter groups"]),
    ],
)
def test_a_class_that_cannot_train_is_found_out_by_one_step(path: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        check_works(find(path))
    text = message(error)
    assert all(word in text for word in words), text


class WithoutRate(Steps):
    """Has no learning rate."""

    def __init__(self, params: object) -> None:
        torch.optim.Optimizer.__init__(self, params, {})


def test_a_parameter_that_the_class_refuses_is_an_error_before_the_model_is_trained() -> None:
    with pytest.raises(UsageError) as error:
        probe("torch.optim:Muon", (64,))
    assert "Muon only supports 2D parameters" in message(error)
    assert probe("torch.optim:Muon", (64, 32)).state_bytes == 4 * 64 * 32


def test_a_package_that_is_not_there_is_named_with_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingExtraError) as error:
        find("no_such_package.optim:Adam")
    assert "pip install no_such_package" in message(error)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "needs_more.py").write_text("import no_such_package.deep")
    with pytest.raises(MissingExtraError) as error:
        find("needs_more:Adam")
    assert "'needs_more' needs the package 'no_such_package'" in message(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 +", "SyntaxError"),
        ("raise ValueError('no\\nway')", "ValueError: no"),
        ("raise SystemExit", "SystemExit"),
        ("raise OSError('libcudart.so.12')", "does not load: libcudart.so.12"),
    ],
)
def test_a_module_that_does_not_import_says_why(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks_at_import.py").write_text(text)
    with pytest.raises(EffcliError) as error:
        find("breaks_at_import:Adam")
    assert words in message(error)


def test_a_class_of_ones_own_trains_from_the_current_folder_and_again_from_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    Path("OwnOptim.py").write_text(
        textwrap.dedent("""
        import torch

        class Heavy(torch.optim.SGD):
            def __init__(self, params, lr=0.25, momentum=0.5, **more):
                super().__init__(params, lr=lr, momentum=momentum, **more)
        """)
    )
    f1, data = model_folder(tmp_path / "f1", F1), csv_file(tmp_path / "d.csv")
    first = effcli(
        "train", f1, "--data", data, "--max-steps", 2, "--out", "a", "--json",
        "--optim", "OwnOptim:Heavy", "--optim-arg", "nesterov=true",
    ).record  # fmt: skip
    assert (first["optimizer"]["name"], first["optimizer"]["basis"]) == ("OwnOptim:Heavy", "probed")
    assert first["optimizer"]["state_bytes"] == first["measured"]["optimizer_state_bytes"] == 557_832
    assert first["optimizer"]["tensors"] == first["measured"]["tensors"]
    assert first["optimizer"]["plan"]["basis"]["optimizer_state"] == "probed"
    assert first["history"][0]["lr"] == 0.25
    again = effcli("train", "--recipe", "a/recipe.yaml", "--out", "b", "--json").record
    assert again["spec"]["optim"] == first["spec"]["optim"]
    assert again["history"] == first["history"]
    shown = effcli("train", f1, "--data", data, "--optim", "OwnOptim:Heavy", "--dry-run").stdout
    assert any("optimizer state" in line and line.split()[-1] == "probed" for line in shown.splitlines())
