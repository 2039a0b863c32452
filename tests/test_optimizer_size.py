"""The inspector: true bytes and counted elements of any optimizer state."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedModel

import effcli
from effcli.measure.optimizer_size import compute_optimizer_size, inspect_optimizer, inspect_states
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.registry import default_hyper, find, resolve_hyper
from effcli.spec import OptimSpec
from effcli.units import StateAmount
from tests.tiny_models import set_gradients, stepped, tiny_distilbert, tiny_gpt2

TABLE = {
    "adamw": (526_264_752, 131_566_188),
    "adafactor": (714_432, 178_712),
    "adafactor-torch": (714_432, 178_608),
    "adam8bit": (134_004_336, 131_566_188),
    "adamw8bit": (134_004_336, 131_566_188),
    "paged-adamw8bit": (134_004_336, 131_566_188),
    "sgd-momentum": (263_132_168, 65_783_042),
}
"""Optimizer -> true bytes and elements on distilbert-base-cased with two labels."""


@pytest.fixture(scope="module")
def distilbert() -> Iterator[PreTrainedModel]:
    torch.manual_seed(0)
    model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=28_996, num_labels=2))
    set_gradients(model)
    yield model
    model.zero_grad(set_to_none=True)


KIN = {"adafactor-torch", "adamw8bit", "paged-adamw8bit"}
"""Of these, those whose state follows the law of another one."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in KIN)) for name in TABLE])
def test_distilbert_base_cased_takes_the_published_bytes_and_elements(name: str, distilbert: PreTrainedModel) -> None:
    entry = find(name)
    assert (sum(p.numel() for p in distilbert.parameters()), len(list(distilbert.parameters()))) == (65_783_042, 104)
    spec = OptimSpec(name=entry.name)
    hyper = resolve_hyper(entry, spec)
    optimizer = entry.build([{"params": list(distilbert.parameters()), "weight_decay": 0.0}], hyper)
    optimizer.step()
    megabytes, elements = compute_optimizer_size(optimizer.state.values())
    predicted = predict_state(entry, parameter_infos(distilbert), hyper)
    assert (megabytes * 1024 * 1024, elements) == TABLE[entry.name]
    assert (predicted.state_bytes, predicted.state_elements) == TABLE[entry.name]
    assert predicted.tensors == inspect_optimizer(optimizer).tensors


def test_the_megabytes_print_as_in_the_course_material(distilbert: PreTrainedModel) -> None:
    shown = {}
    for name in ("adamw", "adafactor", "adam8bit"):
        predicted = predict_state(find(name), parameter_infos(distilbert), resolve_hyper(find(name), OptimSpec()))
        shown[name] = f"{predicted.state_bytes / 2**20:.0f}"
    assert shown == {"adamw": "502", "adafactor": "1", "adam8bit": "128"}
    rule = find("adam8bit").rule_of_thumb_bytes
    assert rule is not None
    assert f"{rule(65_783_042, default_hyper(find('adam8bit'))) / 2**20:.0f}" == "125"


def test_the_function_is_exported_without_loading_torch() -> None:
    assert effcli.compute_optimizer_size is compute_optimizer_size
    code = "import effcli, sys; print('torch' in sys.modules, callable(effcli.compute_optimizer_size))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no_such_name"):
        effcli.no_such_name  # noqa: B018


def test_nothing_takes_nothing() -> None:
    assert compute_optimizer_size([]) == (0.0, 0)
    assert compute_optimizer_size([{}, {"exp_avg": None}]) == (0.0, 0)
    optimizer = torch.optim.AdamW(tiny_gpt2().parameters())
    assert compute_optimizer_size(optimizer.state.values()) == (0.0, 0)


def test_a_step_is_one_element_as_a_number_and_as_a_tensor() -> None:
    size = inspect_states([("a", {"step": 3}), ("b", {"step": torch.tensor(3.0)}), ("c", {"decay": 0.5, "on": True})])
    assert size.tensors == {"step": StateAmount(elements=2, bytes=4)}
    assert size.dtypes == {"step": ("float32", "number")}


def test_quantisation_constants_have_bytes_but_no_elements_and_norms_are_statistics() -> None:
    state = {
        "state1": torch.zeros(512, dtype=torch.uint8),
        "absmax1": torch.zeros(2),
        "qmap1": torch.zeros(256),
        "new_max1": torch.zeros(1),
        "unorm_vec": torch.zeros(1),
        "max_exp_avg_sq": torch.zeros(5),
    }
    size = inspect_states([("weight", state)])
    assert size.state_elements == 512 + 1 + 5
    assert size.state_bytes == 512 + 8 + 1024 + 4 + 4 + 20
    assert (size.by_parameter, size.shared_bytes) == ({"weight": 512 + 8 + 4 + 4 + 20}, 1024)


def test_a_view_holds_its_whole_storage_and_two_views_hold_it_once() -> None:
    base = torch.zeros(1000)
    assert inspect_states([("a", {"m": base[:10]})]).state_bytes == 4000
    size = inspect_states([("a", {"m": base[:10], "v": base[10:20]}), ("b", {"m": base[20:30]})])
    assert (size.state_bytes, size.state_elements, size.num_tensors) == (4000, 30, 3)
    assert size.tensors == {"m": StateAmount(elements=20, bytes=4000), "v": StateAmount(elements=10, bytes=0)}
    assert (size.by_parameter, size.shared_bytes) == ({"a": 0, "b": 0}, 4000)


def test_an_expanded_tensor_takes_what_it_stores() -> None:
    size = inspect_states([("a", {"m": torch.zeros(1).expand(100)})])
    assert (size.state_bytes, size.state_elements) == (4, 100)


def test_equal_tensors_of_their_own_are_not_taken_for_shared() -> None:
    assert inspect_states([(str(i), {"m": torch.zeros(3)}) for i in range(50)]).state_bytes == 50 * 12
    assert inspect_states([(str(i), {"m": torch.zeros(0)}) for i in range(5)]).state_bytes == 0


def test_nested_containers_and_plain_objects_are_searched() -> None:
    class Projector:
        def __init__(self) -> None:
            self.matrix, self.rank, self.itself = torch.zeros(4, 2), 2, self

    class Slotted:
        __slots__ = ("missing", "vector")

        def __init__(self) -> None:
            self.vector = torch.zeros(3)

    state = {
        "exp_avg": {"data": torch.zeros(16, dtype=torch.uint8), "scale": torch.zeros(4), "shape": (16,)},
        "history": [torch.zeros(2), (torch.zeros(2), None)],
        "projector": Projector(),
        "slotted": Slotted(),
        "function": torch.zeros_like,
    }
    size = inspect_states([("weight", state)])
    assert size.tensors == {
        "exp_avg": StateAmount(elements=16, bytes=32),
        "history": StateAmount(elements=4, bytes=16),
        "projector": StateAmount(elements=8, bytes=32),
        "slotted": StateAmount(elements=3, bytes=12),
    }
    assert size.dtypes["exp_avg"] == ("float32", "uint8")


def test_a_state_that_is_a_tensor_or_a_model_is_survived() -> None:
    size = inspect_states([("a", torch.zeros(3)), ("b", {"model": torch.nn.Linear(9, 9)}), ("c", None)])
    assert (size.state_bytes, size.by_parameter) == (12, {"a": 12})


def test_a_state_that_is_the_weight_itself_adds_no_bytes() -> None:
    param = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = {"z": param.detach(), "m": torch.zeros(8)}
    optimizer.state["global"] = {"k": torch.zeros(2)}
    size = inspect_optimizer(optimizer, names={param: "weight"})
    assert size.by_parameter == {"weight": 32, "global": 8}
    assert size.state_elements == 18


class Packed(torch.Tensor):
    """Looks like float32, holds one byte per element and one scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Packed:
        outer: Packed = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        outer.codes, outer.scale = codes, scale
        return outer

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} must not be needed for measuring")


def test_a_tensor_subclass_is_looked_through_for_bytes_and_counted_by_its_outer_shape() -> None:
    scale = torch.zeros(1)
    states = [(str(i), {"exp_avg": Packed(torch.zeros(8, 8, dtype=torch.uint8), scale)}) for i in range(2)]
    size = inspect_states(states)
    assert size.tensors == {"exp_avg": StateAmount(elements=128, bytes=2 * 64 + 4)}
    assert size.dtypes == {"exp_avg": ("float32", "uint8")}
    assert (size.by_parameter, size.shared_bytes) == ({"0": 64, "1": 64}, 4)


def test_torchao_takes_its_true_bytes() -> None:
    optim = pytest.importorskip("torchao.optim")
    model = tiny_distilbert()
    set_gradients(model)
    optimizer = optim.AdamW8bit(model.parameters())
    with torch.compiler.set_stance("force_eager"):  # compiling the step takes tens of seconds and changes no state
        optimizer.step()
    assert inspect_optimizer(optimizer).state_bytes == 324_480


def test_sparse_state_takes_indices_and_values() -> None:
    sparse = torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], (10,), check_invariants=False)
    assert inspect_states([("a", {"m": sparse})]).state_bytes == 2 * 8 + 2 * 4


def test_on_the_meta_device_storages_are_told_apart() -> None:
    model = tiny_gpt2().to("meta")
    model.tie_weights()
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.step()
    size = inspect_optimizer(optimizer)
    assert (size.state_bytes, size.state_elements) == (1_345_648, 2 * 168_192 + 28)


def test_fake_tensors_are_told_apart_and_views_of_one_are_not() -> None:
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(3)]
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer = torch.optim.AdamW(params)
        optimizer.step()
        base = torch.zeros(100)
        assert inspect_states([("a", {"m": base[:1], "v": base[1:]})]).state_bytes == 400
    assert inspect_optimizer(optimizer).tensors["exp_avg"].bytes == 3 * 4 * 64 * 64


def test_a_saved_state_dict_measures_like_the_live_optimizer() -> None:
    model = tiny_distilbert()
    optimizer = stepped(find("adam8bit"), model, OptimSpec(name="adam8bit"))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    size = inspect_states((str(index), state) for index, state in saved["state"].items())
    live = inspect_optimizer(optimizer)
    assert (size.state_bytes, size.tensors) == (295_648, live.tensors)


def test_copies_that_lost_the_sharing_are_counted_as_what_they_are() -> None:
    optimizer = stepped(find("adam8bit"), tiny_distilbert(), OptimSpec(name="adam8bit"))
    separate = [copy.deepcopy(state) for state in optimizer.state.values()]
    assert compute_optimizer_size(separate)[0] * 2**20 == 324_320


def test_names_come_from_the_groups_or_from_the_caller() -> None:
    model = tiny_gpt2()
    optimizer = stepped(find("adamw"), model, OptimSpec())
    by_name = {name: 8 * p.numel() + 4 for name, p in model.named_parameters()}
    assert inspect_optimizer(optimizer).by_parameter == by_name
    given = {param: f"model.{name}" for name, param in model.named_parameters()}
    assert set(inspect_optimizer(optimizer, given).by_parameter) == {f"model.{name}" for name in by_name}
