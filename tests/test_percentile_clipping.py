"""`--percentile-clipping`: against a loop made by hand, in every engine, across a stop, and from the command line."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import accelerate
import numpy as np
import pytest
import torch
from torch.nn.utils import get_total_norm

from effcli.data.batches import Collator
from effcli.data.order import epoch_order
from effcli.engines.base import Loop
from effcli.engines.clipping import PercentileClipping
from effcli.engines.window_schedule import WindowSchedule
from effcli.optim import registry
from effcli.spec import OptimSpec
from tests.commands import effcli
from tests.jobs import ENGINES, ONE_FAST_ENGINE, Outcome, rows, run_job, tiny_model
from tests.stopped_runs import check_that_a_stop_changes_nothing, settings, train_and_stop

pytestmark = pytest.mark.usefixtures("without_plan")

NO_LIMIT = float("inf")
OPTIMIZERS = ("sgd", "adamw", "adafactor", "adam8bit", "muon")


def expected_limits(norms: list[float], percentile: float, max_norm: float = NO_LIMIT) -> list[float]:
    return [min(max_norm, np.percentile(norms[max(0, n - 100) : n], percentile)) for n in range(1, len(norms) + 1)]


def plain_sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for group in groups for parameter in group["params"]], lr=0.1)


def loop_by_hand(*, window: int, epochs: int, percentile: float, max_norm: float) -> tuple[dict, list[float]]:
    """Return the weights and norms of a loop that takes a whole window at once and steps without an optimizer."""
    model, made, norms = tiny_model("classification").train(), rows(11, "classification"), []
    collate = Collator(0, "right", "classification")
    for epoch in range(epochs):
        order = epoch_order(11, 42, epoch).tolist()
        for start in range(0, 11, window):
            model.zero_grad()
            model(**collate([made[row] for row in order[start : start + window]])).loss.backward()
            norms.append(get_total_norm([parameter.grad for parameter in model.parameters()]).item())
            limit = expected_limits(norms, percentile, max_norm)[-1]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * min(1.0, limit / norms[-1]) * parameter.grad
    return model.state_dict(), norms


def job(engine: str, **settings) -> Outcome:
    """Return an outcome of eleven rows in batches of two and windows of two: three updates an epoch."""
    settings = {"max_grad_norm": 0.0, "scheduler": "constant", "make_optimizer": plain_sgd, "epochs": 3} | settings
    return run_job(engine, "classification", num_rows=11, batch_size=2, accum=2, **settings)


def stepped(gradients: list[list[float]], *, percentile: float, max_grad_norm: float = 0.0) -> tuple[list, list]:
    """Return what SGD at rate 1 subtracted in each step, and the limit of each step."""
    weight = torch.nn.Parameter(torch.zeros(len(gradients[0]), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    clipping = clipping_of(weight, optimizer, percentile, max_grad_norm)
    subtracted, limits = [], []
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        subtracted.append((before - weight.detach()).numpy())
        limits.append(clipping.limit)
    return subtracted, limits


def clipping_of(weight, optimizer, percentile: float, max_grad_norm: float = 0.0) -> PercentileClipping:
    loop = Loop(
        device=torch.device("cpu"), precision="fp32", window_schedule=WindowSchedule(num_rows=1, batch_size=1, accum=1),
        max_grad_norm=max_grad_norm, total_updates=1, seed=1, percentile_clipping=percentile,
    )  # fmt: skip
    return PercentileClipping(torch.nn.ParameterList([weight]), optimizer, loop)


def random_gradients(count: int) -> list[list[float]]:
    generator = np.random.default_rng(5)
    return [(generator.lognormal(sigma=1.5) * 1e-4 * generator.normal(size=3)).tolist() for _ in range(count)]


@pytest.mark.parametrize("max_grad_norm", [0.0, 2e-4])
@pytest.mark.parametrize("percentile", [5, 50, 99.5])
def test_each_gradient_is_scaled_to_the_percentile_of_the_last_hundred_norms(percentile, max_grad_norm) -> None:
    # Norms around 1e-4, where torch's own clipping would miss the limit by about a hundredth.
    gradients = random_gradients(130)
    norms = [float(np.linalg.norm(gradient)) for gradient in gradients]
    wanted = expected_limits(norms, percentile, max_grad_norm or NO_LIMIT)
    subtracted, limits = stepped(gradients, percentile=percentile, max_grad_norm=max_grad_norm)
    assert limits == pytest.approx(wanted, rel=1e-12)
    for got, gradient, norm, limit in zip(subtracted, gradients, norms, wanted, strict=True):
        np.testing.assert_allclose(got, np.array(gradient) * min(1.0, limit / norm), rtol=1e-9)
    assert max_grad_norm or (subtracted[0] == gradients[0]).all()  # the percentile never clips the first update
    # The window really moves: with all 130 norms the last limit would be another one.
    assert np.percentile(norms, percentile) != pytest.approx(np.percentile(norms[-100:], percentile), rel=1e-6)


def test_norms_of_zero_count_and_norms_that_are_not_finite_do_not() -> None:
    assert stepped([[3.0], [float("inf")], [float("nan")], [5.0]], percentile=50)[1] == [3.0, 3.0, 3.0, 4.0]
    subtracted, limits = stepped([[0.0], [0.0], [0.0], [7.0]], percentile=50)
    assert (limits[-1], subtracted[-1]) == (0.0, [0.0])


def test_a_step_that_calls_the_step_of_its_base_counts_once() -> None:
    class Derived(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    weight = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([weight])  # from now on torch runs the hooks in the base's step too
    optimizer = Derived([weight], lr=1.0)
    clipping = clipping_of(weight, optimizer, 50)
    for gradient, limit in ((2.0, 2.0), (4.0, 3.0), (8.0, 4.0)):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        assert clipping.limit == limit
    assert weight.item() == -(2.0 + 3.0 + 4.0)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_ends_at_the_weights_of_a_loop_by_hand(engine: str, max_grad_norm: float) -> None:
    weights, norms = loop_by_hand(window=4, epochs=4, percentile=30, max_norm=max_grad_norm or NO_LIMIT)
    outcome = job(engine, epochs=4, percentile=30, max_grad_norm=max_grad_norm)
    limits = expected_limits(norms, 30, max_grad_norm or NO_LIMIT)
    assert outcome.grad_norms == pytest.approx(norms, rel=1e-6)
    assert outcome.limits == pytest.approx(limits, rel=1e-6)
    assert all((outcome.weights[name] - value).abs().max() < 1e-6 for name, value in weights.items())
    assert any(limit == 0.3 for limit in limits) == (max_grad_norm == 0.3)
    assert any(limit < 0.3 for limit in limits)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_engine_clips_every_optimizer_alike(name: str) -> None:
    entry = registry.find(name)
    bits = {"min_8bit_size": 256} if entry.eight_bit else {}
    hyper = registry.resolve_hyper(entry, OptimSpec(name=name, lr=1e-3, **bits))
    settings = {"make_optimizer": lambda groups: entry.build(groups, hyper), "percentile": 20, "epochs": 2}
    first, *others = [job(engine, **settings) for engine in ENGINES]
    assert first.limits == pytest.approx(expected_limits(first.grad_norms, 20), rel=1e-12)
    assert first.losses != job("pytorch", **settings | {"percentile": None}).losses
    for other in others:
        assert other.losses == pytest.approx(first.losses, rel=1e-6)
        assert other.grad_norms == pytest.approx(first.grad_norms, rel=1e-6)
        assert other.limits == pytest.approx(first.limits, rel=1e-6)
        largest = max((first.weights[key] - other.weights[key]).abs().max().item() for key in first.weights)
        assert largest <= 0.01 * 1e-3 * len(first.losses)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_hundredth_percentile_is_a_run_without_it_bit_for_bit(engine: str) -> None:
    one, other = job(engine, percentile=100), job(engine)
    assert one.losses == other.losses
    assert all(torch.equal(one.weights[key], other.weights[key]) for key in one.weights)


@pytest.fixture
def scaler_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fp16 run on a CPU with torch's scaler, in accelerate too, from a scale that overflows at first."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**19)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    init = accelerate.Accelerator.__init__

    def init_with_scaler(self, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        self.native_amp, self.scaler = True, scaler("cpu")

    monkeypatch.setattr(accelerate.Accelerator, "__init__", init_with_scaler)


@pytest.mark.usefixtures("scaler_on_cpu")
def test_under_fp16_norms_are_unscaled_and_skipped_updates_do_not_count() -> None:
    full = job("pytorch", percentile=40)
    outcomes = [job(engine, percentile=40, precision="fp16") for engine in ENGINES]
    for outcome in outcomes:
        finite = [index for index, norm in enumerate(outcome.grad_norms) if np.isfinite(norm)]
        assert finite == [2, 3, 4, 5, 6, 7, 8]
        norms = [outcome.grad_norms[index] for index in finite]
        assert max(norms) < 2 * max(full.grad_norms)
        assert [outcome.limits[index] for index in finite] == pytest.approx(expected_limits(norms, 40), rel=1e-12)
        assert outcome.losses == outcomes[0].losses
        assert all(torch.equal(outcome.weights[key], outcomes[0].weights[key]) for key in outcome.weights)


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_scaler_hands_over_what_is_clipped(fused: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)  # a fused one is called for skipped updates too
    clipping = clipping_of(weight, optimizer, 50)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = 0.0
    for gradient, limit in ((2.0, 2.0), (float("inf"), 2.0), (4.0, 3.0), (8.0, 4.0)):
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        expected -= limit if np.isfinite(gradient) else 0.0
        assert clipping.limit == limit
        assert weight.item() == expected


@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_a_resumed_run_goes_on_with_the_norms_of_the_first_part(engine: str, tmp_path: Path) -> None:
    fields = {"engine": engine, "percentile_clipping": 40, "max_grad_norm": 0, "batch_size": 4, "accum": 1}
    rest = check_that_a_stop_changes_nothing(tmp_path, {}, **fields)
    whole = json.loads((tmp_path / "whole" / "record.json").read_text())
    assert rest.notes[-1] == whole["notes"][-1]
    norms = [line.grad_norm for line in rest.history]
    assert [line.clip_norm for line in rest.history] == expected_limits(norms, 40)
    # Forgetting the first three norms would have shown.
    assert expected_limits(norms, 40)[3:] != expected_limits(norms[3:], 40)


def test_the_record_says_the_limit_of_each_update_and_one_note_sums_up(
    distilbert: Path, data: Path, tmp_path: Path
) -> None:
    common = ("train", distilbert, "--data", data, "--batch-size", 2, "--epochs", 2, "--json")
    done = effcli(*common, "--percentile-clipping", 50, "--max-grad-norm", 0.9, "--out", tmp_path / "o")
    history = done.record["history"]
    norms = [line["grad_norm"] for line in history]
    limits = expected_limits(norms, 50, 0.9)
    assert [line["clip_norm"] for line in history] == limits
    clipped = sum(norm > limit for norm, limit in zip(norms, limits, strict=True))
    fixed = sum(norm > limit == 0.9 for norm, limit in zip(norms, limits, strict=True))
    assert 0 < fixed < clipped < 12
    note = f"Percentile clipping at 50: {clipped} of 12 updates clipped, the last limit was {limits[-1]:.4g}"
    note += f"; in {fixed} of them --max-grad-norm 0.9 was the smaller limit (0 lifts it)."
    assert done.record["notes"].count(note) == done.stderr.splitlines().count(note) == 1

    for flags, limit in (((), 1.0), (("--max-grad-norm", 0), None)):
        record = effcli(*common, *flags, "--out", tmp_path / f"limit-{limit}").record
        assert {line["clip_norm"] for line in record["history"]} == {limit}
        assert not any("ercentile" in note for note in record["notes"])


@pytest.mark.parametrize("value", ["0", "-1", "101", "nan", "x"])
def test_a_percentile_out_of_range_is_refused_in_one_line(value: str) -> None:
    done = effcli("train", "--percentile-clipping", value)
    assert done.code == 2
    assert "--percentile-clipping" in done.error
    assert value in done.error


def test_a_dry_run_shows_the_percentile(distilbert: Path, data: Path) -> None:
    done = effcli("train", distilbert, "--data", data, "--percentile-clipping", 90, "--dry-run", "--json")
    assert done.record["spec"]["loop"]["percentile_clipping"] == 90.0


def test_resume_refuses_another_percentile(tmp_path: Path) -> None:
    train_and_stop(settings(tmp_path, "o", {}, percentile_clipping=40), after=2)
    done = effcli("train", "--out", tmp_path / "o", "--resume", "--percentile-clipping", 50)
    assert done.code == 2
    assert "other values of --percentile-clipping" in done.error


def test_a_checkpoint_from_before_percentile_clipping_resumes_without_it_alone(tmp_path: Path) -> None:
    train_and_stop(settings(tmp_path, "o", {}), after=2)
    folder = next((tmp_path / "o" / "checkpoints").iterdir())
    saved = json.loads((folder / "progress.json").read_text())
    del saved["spec"]["loop"]["percentile_clipping"]
    for line in saved["history"]:
        del line["clip_norm"]
    (folder / "progress.json").write_text(json.dumps(saved))
    sums = json.loads((folder / "manifest.json").read_text())
    sums["progress.json"] = hashlib.sha256((folder / "progress.json").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(sums))

    refused = effcli("train", "--out", tmp_path / "o", "--resume", "--percentile-clipping", 50)
    assert refused.code == 2
    assert "other values of --percentile-clipping" in refused.error
    done = effcli("train", "--out", tmp_path / "o", "--resume", "--json")
    assert [line["clip_norm"] for line in done.record["history"]] == [None] * 2 + [1.0] * 8
