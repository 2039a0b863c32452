"""Runs that fail or go on in ways that are neither the user's nor ours to foresee: code of others, saved settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import effcli

pytestmark = pytest.mark.usefixtures("without_plan")

OPTIMIZERS = """
import torch

class WithoutRate(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)

class FailsLater(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps > 3:
            raise RuntimeError("the fourth step\\nof many lines")
        return super().step(closure)
"""


@pytest.fixture
def run(distilbert: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    (tmp_path / "own_optimizers.py").write_text(OPTIMIZERS)
    monkeypatch.syspath_prepend(tmp_path)
    return ("train", distilbert, "--data", data, "--batch-size", 2, "--out", tmp_path / "run", "--json")


def test_a_class_without_a_learning_rate_trains(run: tuple[object, ...]) -> None:
    record = effcli(*run, "--optim", "own_optimizers:WithoutRate", "--max-steps", 2).record
    assert (record["status"], record["history"][0]["lr"]) == ("completed", 0.1)


def test_what_an_optimizer_raises_in_a_later_step_names_the_update_and_is_no_fault_of_ours(
    run: tuple[object, ...],
) -> None:
    failed = effcli(*run, "--optim", "own_optimizers:FailsLater", "--max-steps", 6)
    assert failed.code == 7
    assert "update 4 failed in the model or the optimizer, RuntimeError: the fourth step" in failed.error


@pytest.mark.parametrize("name", ["rprop", "torch.optim:Rprop"])
def test_an_optimizer_without_decay_resumes_and_runs_again_from_its_recipe(
    run: tuple[object, ...], name: str, tmp_path: Path
) -> None:
    assert effcli(*run, "--optim", name, "--max-steps", 2).code == 0
    resumed = effcli("train", "--out", tmp_path / "run", "--resume", "--max-steps", 4, "--json").record
    assert len(resumed["history"]) == 4
    again = effcli("train", "--recipe", tmp_path / "run" / "recipe.yaml", "--out", tmp_path / "again", "--dry-run")
    assert again.code == 0, again.stderr


def test_a_control_character_in_an_argument_is_shown_and_not_sent() -> None:
    failed = effcli("optimizers", "\x1b[31mred")
    assert "\x1b" not in failed.stderr
    assert r"\x1b[31mred" in failed.error


def test_an_unknown_name_beside_all_is_refused_and_a_name_given_twice_counts_once() -> None:
    assert effcli("estimate", "gpt2", "--optim", "all", "--optim", "nope").code == 2
    record = effcli("estimate", "gpt2", "--optim", "adamw", "--optim", "adamw_torch", "--json").record
    assert [optimizer["name"] for optimizer in record["optimizers"]] == ["adamw"]
