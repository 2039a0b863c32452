"""bf16-pure: weights without a 32-bit copy, whose small updates vanish; the share that moved is counted and said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_outputs import SequenceClassifierOutput

from effcli.engines.window import WindowLoss
from effcli.measure import precision
from effcli.measure.precision import WeightChanges
from tests.commands import effcli, saved_weights
from tests.heads import rows
from tests.jobs import ENGINES, run_job
from tests.tiny_models import tiny_distilbert

pytestmark = pytest.mark.usefixtures("without_plan")


class Ones(torch.nn.Module):
    """Eight weights of 1.0 with the gradient 1, when the loss is the sum of the logits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, dtype=dtype))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(logits=self.weight[None])


@pytest.mark.parametrize(("dtype", "end"), [(torch.float32, 0.94), (torch.bfloat16, 1.0)])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_hundred_small_updates_add_up_in_fp32_and_vanish_in_bf16(
    engine: str, dtype: torch.dtype, end: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WindowLoss, "total", lambda self, logits, labels: logits.float().sum())
    model, seen = Ones(dtype), []

    def optimizer(groups: list[dict]) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.0)
        seen.append(WeightChanges(model, made))
        return made

    outcome = run_job(
        engine, "classification", num_rows=1, batch_size=1, accum=1, max_steps=100, model=model, max_grad_norm=0.0,
        made_rows=rows(1, "classification"), precision="bf16-pure" if dtype == torch.bfloat16 else "fp32",
        scheduler="constant", make_optimizer=optimizer,
    )  # fmt: skip
    assert outcome.grad_norms == pytest.approx([8**0.5] * 100, rel=1e-2)
    if dtype == torch.float32:
        assert outcome.weights["weight"].tolist() == pytest.approx([end] * 8, abs=5e-5)
        assert seen[0].result() is None
    else:
        assert outcome.weights["weight"].tolist() == [end] * 8
        changes = seen[0].result()
        assert (changes.num_weights, changes.num_with_gradient, changes.num_changed) == (8, 8, 0)


def test_weights_that_never_had_a_gradient_are_left_out_of_the_share() -> None:
    model = torch.nn.ModuleList([torch.nn.Embedding(10, 4), torch.nn.Linear(4, 2)]).to(torch.bfloat16)
    for weight in model.parameters():
        torch.nn.init.ones_(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    changes = WeightChanges(model, optimizer)
    assert changes.result() is None
    for token in (3, 3, 7):
        optimizer.zero_grad()
        model[1](model[0](torch.tensor([token]))).sum().backward()
        model[1].bias.grad.fill_(1e-4)  # too small beside a weight of 1.0
        optimizer.step()
    found = changes.result()
    # Two of ten rows of the embedding, the matrix, and the bias, which alone stays as it was.
    assert (found.num_weights, found.num_compared) == (50, 50)
    assert (found.num_with_gradient, found.num_changed) == (2 * 4 + 8 + 2, 2 * 4 + 8)
    assert found.share == pytest.approx(16 / 18)
    changes.detach()
    optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks


def test_a_large_model_is_compared_on_evenly_spaced_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "MAX_COMPARED", 1000)
    matrix = torch.nn.Parameter(torch.ones(300, 100, dtype=torch.bfloat16))
    model = torch.nn.ParameterList([matrix, torch.nn.Parameter(torch.ones(3))])  # fp32 has nothing to lose
    optimizer = torch.optim.SGD([matrix], lr=1.0)
    changes = WeightChanges(model, optimizer)
    matrix.grad = torch.full_like(matrix, 1e-4)
    matrix.grad[:, ::4] = 1.0  # every fourth column moves
    optimizer.step()
    found = changes.result()
    assert found.num_weights == 30_000
    assert 900 <= found.num_compared <= 1000
    assert found.share == pytest.approx(0.25, abs=0.01)


def test_many_small_weights_count_for_no_more_than_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "MAX_COMPARED", 1000)
    small = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2000)]
    large = torch.nn.Parameter(torch.ones(6000, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([*small, large], lr=1.0)
    changes = WeightChanges(torch.nn.ParameterList([*small, large]), optimizer)
    for weight in small:
        weight.grad = torch.full_like(weight, 1e-4)  # too small beside 1.0
    large.grad = torch.ones_like(large)
    optimizer.step()
    found = changes.result()
    assert 900 <= found.num_compared <= 1000
    assert found.share == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_record_counts_what_differs_between_the_weights_before_and_after(
    engine: str, data: Path, tmp_path: Path
) -> None:
    tiny_distilbert().save_pretrained(tmp_path / "model")
    start = {
        name: value.to(torch.bfloat16) for name, value in load_file(tmp_path / "model" / "model.safetensors").items()
    }
    for rate, vanish in ((1e-6, True), (1e-2, False)):
        flags = ("--precision", "bf16-pure", "--lr", rate, "--engine", engine, "--batch-size", 4, "--epochs", 2)
        out = tmp_path / f"o{rate}"
        done = effcli("train", tmp_path / "model", "--data", data, *flags, "--out", out, "--json")
        changes = done.record["measured"]["weight_changes"]
        end = saved_weights(out)
        assert changes["num_changed"] == sum(int((end[name] != start[name]).sum()) for name in start)
        assert changes["num_weights"] == changes["num_compared"] == 139_458
        share = changes["num_changed"] / changes["num_with_gradient"]
        assert share < 0.1 if vanish else share > 0.9
        note = f"{share:.1%} of the bf16 weights with a gradient changed"
        assert note in done.stderr
        assert ("most updates were rounded away" in done.stderr) is vanish
        assert any(line.startswith(note) for line in done.record["notes"])
        assert "bf16-pure keeps no 32-bit copy of the weights" in done.stderr


def test_precisions_with_a_32_bit_copy_have_nothing_to_say(distilbert: Path, data: Path, tmp_path: Path) -> None:
    done = effcli("train", distilbert, "--data", data, "--precision", "bf16", "--out", tmp_path / "o", "--json")
    assert done.record["measured"]["weight_changes"] is None
    assert "32-bit copy" not in done.stderr
