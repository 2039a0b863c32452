"""Checkpoints by themselves: what is noticed, what is kept, and that nothing changes on the disk."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from effcli.engines.checkpoint import FILES, MANIFEST, TRAINING, CheckpointStore, restore
from effcli.errors import TrainingFailedError
from effcli.measure.optimizer_size import inspect_optimizer
from tests.checkpoints import Trap, let_manifest_fit, progress_after

LINE = {"update": 1, "epoch": 0.1, "loss": 0.1 + 0.2, "lr": 1e-3, "grad_norm": 1.0, "clip_norm": None, "skipped": False}


class Trained:
    """A small model with an optimizer that has stepped once."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(4, 3).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda update: 1 / (1 + update))
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4, dtype=next(self.model.parameters()).dtype)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def store_of(folder: Path, updates: int, *, keep: int = 9, **more: Any) -> CheckpointStore:
    store = CheckpointStore(folder, keep=keep, **more)
    for update in range(1, updates + 1):
        store.save(progress_after(update), **Trained().parts)
    return store


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_any_flipped_byte_is_noticed_and_the_checkpoint_before_is_used(name: str, tmp_path: Path) -> None:
    store = store_of(tmp_path, 2)
    older, newest = store.paths()
    content = (newest / name).read_bytes()
    for place in range(0, len(content), max(1, len(content) // 97)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (newest / name).write_bytes(changed)
        found = store.newest_intact()
        assert (found.path, found.progress.update, found.damaged) == (older, 1, (newest,)), (name, place)
    (newest / name).write_bytes(content)
    assert store.newest_intact().path == newest


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda folder, name=name: (folder / name).unlink() for name in (*FILES, MANIFEST)),
        *(lambda folder, name=name: truncate(folder / name) for name in (*FILES, MANIFEST)),
        lambda folder: (shutil.rmtree(folder), folder.mkdir()),
        lambda folder: (shutil.rmtree(folder), folder.write_text("a file")),
        lambda folder: (folder / MANIFEST).write_text("{}"),
        lambda folder: (folder / MANIFEST).write_text("[1]"),
        lambda folder: (folder / MANIFEST).write_text("[" * 100_000),
    ],
)
def test_a_checkpoint_that_lacks_something_is_passed_over(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    store = store_of(tmp_path, 2)
    older, newest = store.paths()
    damage(newest)
    assert store.newest_intact().path == older
    damage(older)
    with pytest.raises(TrainingFailedError, match="every checkpoint in"):
        store.newest_intact()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(keep: int, tmp_path: Path) -> None:
    names = [path.name for path in store_of(tmp_path, 4, keep=keep).paths()]
    assert names == [f"update-{update:08d}" for update in range(5 - keep, 5)]


def test_damaged_checkpoints_go_with_the_next_one_and_do_not_count(tmp_path: Path) -> None:
    older, intact, first, second = store_of(tmp_path, 4).paths()
    truncate(first / TRAINING)
    truncate(second / TRAINING)
    damaged = CheckpointStore(tmp_path, keep=2).newest_intact().damaged
    assert damaged == (second, first)
    store = CheckpointStore(tmp_path, keep=2, damaged=damaged)
    assert store.paths() == [older, intact, first, second]
    store.save(progress_after(3), **Trained().parts)
    assert store.paths() == [intact, first]
    assert store.newest_intact().path == first


def pickled(path: Path, trap: Trap) -> None:
    path.write_bytes(pickle.dumps(trap, protocol=2))


def saved_by_torch(path: Path, trap: Trap) -> None:
    torch.save({"optimizer": trap}, path)


@pytest.mark.parametrize("write", [pickled, saved_by_torch])
def test_a_pickle_that_would_run_code_is_not_loaded(write: Callable[[Path, Trap], None], tmp_path: Path) -> None:
    trained = Trained()
    path = CheckpointStore(tmp_path / "c", keep=1).save(progress_after(1), **trained.parts)
    write(path / TRAINING, Trap(tmp_path / "ran"))
    let_manifest_fit(path, TRAINING)
    assert CheckpointStore(tmp_path / "c", keep=1).newest_intact().path == path
    with pytest.raises(TrainingFailedError, match="more than tensors and plain values") as raised:
        restore(path, **trained.parts)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, keep=1).save(progress_after(1), **Trained().parts)
    other = Trained()
    other.model = torch.nn.Linear(5, 3)
    with pytest.raises(TrainingFailedError, match="the model has changed"):
        restore(path, **other.parts)


@pytest.mark.parametrize(
    "change",
    [
        lambda progress: {key: value for key, value in progress.items() if key != "origin"},
        lambda progress: {key: value for key, value in progress.items() if key != "first_window"},
        lambda progress: progress | {"spec": None},
        lambda progress: progress | {"spec": {"loop": None}},
        lambda progress: progress | {"history": [{"update": 1}]},
        lambda progress: progress | {"history": [LINE | {"another": 1}]},
        lambda progress: progress | {"evaluations": [{"update": 1, "epoch": 1.0, "result": {"lost": 1.0}}]},
        lambda progress: progress | {"another": 1},
        lambda progress: [],
    ],
)
def test_a_checkpoint_of_another_version_is_refused_in_one_line(change: Callable[[Any], Any], tmp_path: Path) -> None:
    (path,) = store_of(tmp_path, 1).paths()
    progress = json.loads((path / "progress.json").read_text()) | {"history": [LINE]}
    (path / "progress.json").write_text(json.dumps(progress))
    let_manifest_fit(path, "progress.json")
    assert CheckpointStore(tmp_path, keep=1).newest_intact().progress.history[0].loss == LINE["loss"]
    (path / "progress.json").write_text(json.dumps(change(progress)))
    let_manifest_fit(path, "progress.json")
    with pytest.raises(TrainingFailedError, match="another version of effcli"):
        CheckpointStore(tmp_path, keep=1).newest_intact()


@pytest.mark.parametrize("step", [257, 10_001])
def test_steps_that_bf16_cannot_count_survive_beside_bf16_weights(step: int, tmp_path: Path) -> None:
    trained, fresh = Trained(torch.bfloat16), Trained(torch.bfloat16)
    for state in trained.optimizer.state.values():
        state["step"].fill_(step)
    path = CheckpointStore(tmp_path, keep=1).save(progress_after(1), **trained.parts)
    restore(path, **fresh.parts)
    for before, after in zip(trained.optimizer.state.values(), fresh.optimizer.state.values(), strict=True):
        assert after["step"].dtype == torch.float32
        assert int(after["step"]) == step != int(after["step"].bfloat16())
        assert {name: value.dtype for name, value in after.items()} == {
            name: value.dtype for name, value in before.items()
        }
    assert inspect_optimizer(fresh.optimizer).tensors == inspect_optimizer(trained.optimizer).tensors


def test_the_scale_of_fp16_and_its_age_come_back(tmp_path: Path) -> None:
    trained, fresh = Trained(), Trained()
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    scaler.scale(torch.ones(()))  # its tensors are made at the first use
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
    path = CheckpointStore(tmp_path, keep=1).save(progress_after(1), **trained.parts, scaler=scaler)
    restore(path, **fresh.parts, scaler=other)
    assert other.state_dict() == scaler.state_dict()
    assert (other.get_scale(), other.state_dict()["_growth_tracker"]) == (8.0, 5)


def test_the_next_rate_is_that_of_the_schedule_that_goes_on(tmp_path: Path) -> None:
    trained, fresh = Trained(), Trained()
    path = CheckpointStore(tmp_path, keep=1).save(progress_after(1), **trained.parts)
    fresh.scheduler = torch.optim.lr_scheduler.LambdaLR(fresh.optimizer, lambda update: 1 - update / 4)
    restore(path, **fresh.parts)
    assert fresh.optimizer.param_groups[0]["lr"] == 0.1 * 0.75
