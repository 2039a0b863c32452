"""The inspector on wrapped optimizers, odd objects and odd tensors, and what it says about missing state."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from effcli.measure.optimizer_size import inspect_optimizer, inspect_states, state_notes
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.groups import decay_groups
from effcli.optim.registry import find, resolve_hyper
from effcli.spec import OptimSpec
from effcli.units import StateAmount
from tests.tiny_models import set_gradients, stepped, tiny_gpt2


class Wrapper:
    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


def test_a_wrapped_optimizer_is_looked_through() -> None:
    optimizer = stepped(find("adamw"), tiny_gpt2(), OptimSpec())
    assert inspect_optimizer(Wrapper(Wrapper(optimizer))) == inspect_optimizer(optimizer)
    circle = Wrapper(optimizer)
    circle.optimizer = Wrapper(circle)
    assert inspect_optimizer(circle).state_bytes == 0


def test_accelerates_and_trainers_wrappers_are_looked_through(tmp_path) -> None:
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    model = tiny_gpt2()
    optimizer = stepped(find("adamw"), model, OptimSpec())
    accelerator = Accelerator(cpu=True)
    assert inspect_optimizer(accelerator.prepare(Wrapper(optimizer).optimizer)) == inspect_optimizer(optimizer)

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, use_cpu=True, optim="adafactor",
        report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert type(trainer.optimizer).__name__ == "AcceleratedOptimizer"
    predicted = predict_state(find("adafactor"), parameter_infos(model), resolve_hyper(find("adafactor"), OptimSpec()))
    assert inspect_optimizer(trainer.optimizer).tensors == predicted.tensors


def test_a_wrapper_with_a_state_of_its_own_counts_beside_what_it_wraps() -> None:
    lookahead = pytest.importorskip("pytorch_optimizer").Lookahead
    model = tiny_gpt2()
    set_gradients(model)
    wrapped = lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    wrapped.step()
    size = inspect_optimizer(wrapped)
    assert {key: amount.bytes for key, amount in size.tensors.items()} == {
        "slow_params": 4 * 168_192,
        "momentum_buffer": 4 * 168_192,
    }
    assert sum(size.by_parameter.values()) == size.state_bytes


def test_galores_projector_is_opened() -> None:
    galore = pytest.importorskip("galore_torch")
    weight = torch.nn.Parameter(torch.randn(96, 64))
    weight.grad = torch.randn(96, 64)
    options = {"rank": 8, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    optimizer = galore.GaLoreAdamW([{"params": [weight], **options}], no_deprecation_warning=True)
    optimizer.step()
    size = inspect_optimizer(optimizer)
    # eight rows that are a view of the whole matrix of singular vectors, which stays in memory with them
    assert size.tensors["projector"] == StateAmount(elements=8 * 64, bytes=4 * 64 * 64)
    assert size.tensors["exp_avg"] == StateAmount(elements=96 * 8, bytes=4 * 96 * 8)


def test_before_the_first_step_nothing_is_allocated_and_it_says_so() -> None:
    model = tiny_gpt2()
    fresh = inspect_optimizer(torch.optim.AdamW(model.parameters()))
    assert not fresh.allocated
    assert (fresh.state_bytes, fresh.without_state) == (0, ())
    assert fresh.describe().startswith("not allocated yet")
    set_gradients(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.step()
    kept = inspect_optimizer(plain)
    assert (kept.allocated, kept.describe()) == (False, fresh.describe())
    assert "keeps none" in kept.describe()
    assert inspect_optimizer(torch.optim.Adagrad(model.parameters())).allocated  # in the constructor


def test_parameters_that_never_got_a_gradient_are_named() -> None:
    model = tiny_gpt2()
    set_gradients(model)
    idle = ["transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias", "transformer.h.1.ln_1.bias"]
    for name in idle:
        model.get_parameter(name).grad = None
    for entry in ("adamw", "adam8bit", "adafactor"):
        optimizer = find(entry).build(decay_groups(model, 0.01), resolve_hyper(find(entry), OptimSpec()))
        optimizer.step()
        size = inspect_optimizer(optimizer)
        assert set(size.without_state) == set(idle)
        assert not set(size.by_parameter) & set(idle)
        assert size.describe().endswith("no state for " + ", ".join(size.without_state[:3]) + " and 1 more")
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert inspect_optimizer(optimizer).without_state == ()


@pytest.mark.parametrize(
    ("without_state", "expected"),
    [
        ((), ["1 trainable tensor never got a gradient, so they have none: a. The estimate counts them."]),
        (("a", "b"), ["1 trainable tensor never got a gradient, so they have none and no optimizer state: a."]),
    ],
)
def test_a_run_says_what_got_no_gradient_and_whether_that_spares_state(without_state, expected) -> None:
    size = replace(inspect_states([("c", {"m": torch.zeros(2)})]), without_state=without_state)
    notes = state_notes(size, without_gradient=("a",), predicted_bytes=8)
    assert [note[: len(text)] for note, text in zip(notes, expected, strict=True)] == expected
    assert state_notes(size, without_gradient=(), predicted_bytes=8) == ()
    nothing = inspect_states([])
    assert state_notes(nothing, without_gradient=(), predicted_bytes=0) == ()
    assert state_notes(nothing, without_gradient=(), predicted_bytes=8)[0].startswith("Optimizer state: not allocated")


def test_a_state_of_the_whole_optimizer_counts_under_its_own_name_and_once() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(8))], lr=0.1)
    optimizer.state["k"] = torch.zeros(1, dtype=torch.int64)
    counter = torch.zeros(())
    for index in range(3):
        optimizer.state[f"group {index}"] = {"step": counter}
    size = inspect_optimizer(optimizer)
    assert size.tensors == {"k": StateAmount(elements=1, bytes=8), "step": StateAmount(elements=1, bytes=4)}


class Hostile:
    """Stores two tensors and refuses every other question."""

    __slots__ = ("__dict__", "slot", "unset")

    def __init__(self) -> None:
        self.slot, self.plain = torch.zeros(2), torch.zeros(3)

    @property
    def broken(self) -> torch.Tensor:
        raise RuntimeError("no such thing")

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_odd_objects_are_survived() -> None:
    cyclic: dict[object, object] = {"m": torch.zeros(4)}
    cyclic["self"] = [cyclic, {"again": cyclic}]
    deep: list[object] = [torch.zeros(1)]
    for _ in range(5000):
        deep = [deep]
    state = {
        "hostile": Hostile(),
        "cyclic": cyclic,
        "deep": deep,
        "array": np.zeros(5),
        "by_tensor": {torch.nn.Parameter(torch.zeros(2)): torch.zeros(6)},
        "text": "step",
        "generator": (index for index in range(3)),
    }
    size = inspect_states([("weight", state)])
    assert {key: amount.bytes for key, amount in size.tensors.items()} == {
        "hostile": 20, "cyclic": 16, "deep": 4, "by_tensor": 24
    }  # fmt: skip


def test_every_layout_of_a_tensor_is_survived() -> None:
    starts, places, values = torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([2.0, 3.0])
    blocks = values.reshape(2, 1, 1).clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls compressed layouts a beta
        by_layout = {
            "coo": torch.sparse_coo_tensor(torch.stack([places, places]), values, (2, 2), check_invariants=False),
            "csr": torch.sparse_csr_tensor(starts, places, values, (2, 2)),
            "csc": torch.sparse_csc_tensor(starts, places, values.clone(), (2, 2)),
            "bsr": torch.sparse_bsr_tensor(starts, places, blocks, (2, 2)),
        }
    for name, num_bytes in {"coo": 32 + 8, "csr": 24 + 16 + 8, "csc": 24 + 16 + 8, "bsr": 24 + 16 + 8}.items():
        assert inspect_states([("weight", {"m": by_layout[name]})]).state_bytes == num_bytes, name
    if torch.backends.mkldnn.is_available():
        assert inspect_states([("weight", {"m": torch.zeros(8, 8).to_mkldnn()})]).state_bytes == 256
    assert inspect_states([("weight", {"m": torch.zeros(8, device="meta")})]).state_bytes == 32
