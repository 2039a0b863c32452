"""GaLore: what the projector really holds, which parameters get one, and checkpoints without the projector's class."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from galore_torch import GaLoreAdamW

from effcli.measure.optimizer_size import inspect_optimizer, inspect_states
from effcli.memory.state import predict_state
from effcli.models.build import parameter_infos
from effcli.optim.hyper import resolve_hyper
from effcli.optim.registry import find
from effcli.spec import OptimSpec
from effcli.units import ParamInfo
from tests.stopped_runs import check_that_a_stop_changes_nothing
from tests.tiny_models import set_gradients, stepped, tiny_gpt2

pytestmark = pytest.mark.usefixtures("without_plan")

GALORE = find("galore-adamw")
# What upstream's projector of 8 vectors was found to hold for a matrix of 96 x 40 and of 40 x 96, in bytes.
PROJECTOR = {
    (torch.float32, "std"): (6_400, 6_400),
    (torch.float32, "reverse_std"): (15_360, 15_360),
    (torch.float32, "left"): (15_360, 6_400),
    (torch.float32, "right"): (6_400, 15_360),
    (torch.float32, "full"): (21_760, 21_760),
    (torch.bfloat16, "std"): (640, 640),
    (torch.bfloat16, "reverse_std"): (1_536, 1_536),
    (torch.bfloat16, "left"): (1_536, 640),
    (torch.bfloat16, "right"): (640, 1_536),
    (torch.bfloat16, "full"): (2_176, 2_176),
}


def spec_of(**args: object) -> OptimSpec:
    return OptimSpec(name="galore-adamw", args={"rank": 8, **args})


def matrices(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((96, 40), (40, 96))]


def updated(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], updates: int) -> None:
    torch.manual_seed(1)
    for _ in range(updates):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()


@pytest.mark.parametrize(("dtype", "proj_type"), PROJECTOR, ids=str)
def test_the_projector_holds_what_was_predicted_for_every_side(dtype: torch.dtype, proj_type: str) -> None:
    params, hyper = matrices(dtype), resolve_hyper(GALORE, spec_of(proj_type=proj_type, update_proj_gap=2))
    optimizer = GALORE.build([{"params": params, "names": ["tall", "wide"]}], hyper)
    width = str(dtype).removeprefix("torch.")
    seen = [ParamInfo(name=n, shape=s, dtype=width) for n, s in (("tall", (96, 40)), ("wide", (40, 96)))]
    predicted = predict_state(GALORE, seen, hyper)
    for _ in range(3):  # the third update projects anew
        updated(optimizer, params, 1)
        assert predicted.tensors == inspect_optimizer(optimizer).tensors
    held = [inspect_states([("", optimizer.state[param])]).tensors["projector"].bytes for param in params]
    assert tuple(held) == PROJECTOR[dtype, proj_type]


def test_hidden_matrices_are_projected_and_nothing_else() -> None:
    model = tiny_gpt2()
    optimizer = stepped(GALORE, model, spec_of())
    projected = {name for name, param in model.named_parameters() if "projector" in optimizer.state[param]}
    assert {name.split(".", 3)[3] for name in projected} == {
        "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight",
    }  # fmt: skip
    assert len(projected) == 8
    predicted = predict_state(GALORE, parameter_infos(model), resolve_hyper(GALORE, spec_of()))
    assert predicted.tensors == inspect_optimizer(optimizer).tensors


def test_a_matrix_that_a_projection_would_not_make_smaller_is_plain_adamw() -> None:
    model = tiny_gpt2()
    optimizer = stepped(GALORE, model, spec_of(rank=64))
    assert not any("projector" in state for state in optimizer.state.values())
    assert inspect_optimizer(optimizer).state_bytes == 8 * 168_192


def test_updates_are_those_of_upstream_with_the_same_groups() -> None:
    ours, theirs = [*matrices(), torch.nn.Parameter(torch.ones(50))], [*matrices(), torch.nn.Parameter(torch.ones(50))]
    options = {"rank": 8, "update_proj_gap": 2, "scale": 0.5, "proj_type": "reverse_std"}
    hyper = resolve_hyper(GALORE, OptimSpec(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-4, args={**options}))
    mine = GALORE.build([{"params": ours, "weight_decay": 0.1}], hyper)
    upstream = GaLoreAdamW(
        [{"params": theirs[2:]}, {"params": theirs[:2], **options}],
        lr=1e-2, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1, no_deprecation_warning=True,
    )  # fmt: skip
    for _ in range(5):
        set_gradients(torch.nn.ParameterList(ours))
        for one, other in zip(ours, theirs, strict=True):
            other.grad = one.grad.clone()
        mine.step()
        upstream.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("proj_type", ["std", "full"])
def test_a_state_dict_holds_tensors_only_and_restores_the_projector(proj_type: str, tmp_path: Path) -> None:
    params, fresh_params = matrices(), matrices()
    hyper = resolve_hyper(GALORE, spec_of(proj_type=proj_type, update_proj_gap=10))
    optimizer, fresh = (GALORE.build([{"params": each}], hyper) for each in (params, fresh_params))
    updated(optimizer, params, 3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert isinstance(loaded["state"][0]["projector"], list if proj_type == "full" else torch.Tensor)
    assert inspect_states(loaded["state"].items()).state_bytes == inspect_optimizer(optimizer).state_bytes

    fresh.load_state_dict(loaded)
    for one, other in zip(params, fresh_params, strict=True):
        other.data.copy_(one)
    updated(optimizer, params, 2)
    updated(fresh, fresh_params, 2)
    assert all(torch.equal(one, other) for one, other in zip(params, fresh_params, strict=True))
    assert inspect_optimizer(fresh).tensors == inspect_optimizer(optimizer).tensors


@pytest.mark.gpu
def test_loaded_matrices_of_a_projector_go_to_the_device_of_their_parameter() -> None:
    params = [torch.nn.Parameter(torch.randn(96, 40, device="cuda"))]
    optimizer, fresh = (GALORE.build([{"params": params}], resolve_hyper(GALORE, spec_of())) for _ in range(2))
    updated(optimizer, params, 2)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, map_location="cpu", weights_only=True))
    updated(fresh, params, 1)
    assert inspect_optimizer(fresh).tensors == inspect_optimizer(optimizer).tensors


@pytest.mark.parametrize(
    ("engine", "precision", "proj_type"),
    [("pytorch", "bf16-pure", "full"), ("accelerate", "fp32", "std"), ("trainer", "fp32", "std")],
)
def test_a_resumed_run_ends_as_the_uninterrupted_one(
    engine: str, precision: str, proj_type: str, tmp_path: Path
) -> None:
    # Projections before updates 1, 5 and 9, so that the resumed part, from update 4 on, starts with a loaded one.
    args = {"rank": 8, "update_proj_gap": 4, "proj_type": proj_type}
    record = check_that_a_stop_changes_nothing(
        tmp_path, {"name": "galore_adamw", "args": args}, engine=engine, precision=precision
    )
    assert record.measured.tensors["projector"].bytes > 0
