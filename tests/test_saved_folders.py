"""Which part of a folder is read, and what a folder without an optimizer state is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from effcli.engines.checkpoint import PROGRESS, CheckpointStore
from effcli.errors import DataError
from effcli.measure.optimizer_size import inspect_optimizer, inspect_states
from effcli.saved import read_saved
from tests.checkpoints import progress_after


def optimizer(lr: float = 0.1) -> torch.optim.Optimizer:
    param = torch.nn.Parameter(torch.ones(3, 2))
    made = torch.optim.AdamW([param], lr=lr)
    param.grad = torch.ones(3, 2)
    made.step()
    return made


def write(path: Path, lr: float = 0.1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(optimizer(lr).state_dict(), path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(DataError) as raised:
        read_saved(path)
    return str(raised.value)


def trainer_checkpoint(folder: Path, lr: float = 0.1) -> Path:
    write(folder / "optimizer.pt", lr)
    torch.save({"w": torch.ones(2)}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text("{}")
    return folder


def test_a_trainer_checkpoint_is_read_and_an_output_folder_gives_its_newest(tmp_path: Path) -> None:
    for step in (9, 500, 1000):
        trainer_checkpoint(tmp_path / f"checkpoint-{step}", lr=float(step))
    found = read_saved(tmp_path / "checkpoint-9")
    assert (found.format, found.path) == ("Trainer checkpoint", tmp_path / "checkpoint-9" / "optimizer.pt")
    assert (found.groups[0]["lr"], found.notes) == (9.0, ())
    newest = read_saved(tmp_path)
    assert (newest.groups[0]["lr"], newest.notes) == (1000.0, ("Newest of 3 checkpoints: checkpoint-1000.",))
    (tmp_path / "checkpoint-1000" / "optimizer.pt").unlink()
    older = read_saved(tmp_path)
    assert older.groups[0]["lr"] == 500.0
    assert older.notes == ("Newest with an optimizer state of 3 checkpoints: checkpoint-500.",)
    for step in (9, 500):
        (tmp_path / f"checkpoint-{step}" / "optimizer.pt").unlink()
    assert "a Trainer checkpoint that was saved without its optimizer" in refused(tmp_path)


def test_a_folder_that_is_a_checkpoint_of_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").symlink_to(tmp_path)
    assert "holds no optimizer state" in refused(tmp_path)


def test_accelerates_folder_of_several_optimizers_gives_the_first_and_names_the_others(tmp_path: Path) -> None:
    for name in ("optimizer.bin", "optimizer_1.bin", "optimizer_10.bin", "optimizer_2.bin"):
        write(tmp_path / name, lr=0.5)
    found = read_saved(tmp_path)
    assert (found.format, found.path.name) == ("accelerate state", "optimizer.bin")
    (note,) = found.notes
    assert note.startswith("It holds 4 optimizers; this is 'optimizer.bin'.")
    assert note.endswith("optimizer_1.bin, optimizer_2.bin, optimizer_10.bin.")
    project = tmp_path / "project"
    write(project / "checkpoints" / "checkpoint_0" / "optimizer.bin", lr=1.0)
    write(project / "checkpoints" / "checkpoint_1" / "optimizer.bin", lr=2.0)
    assert read_saved(project).groups[0]["lr"] == 2.0


def test_files_of_single_ranks_are_not_taken_for_the_optimizer(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"optimizer_0_rank{rank}.bin")
    assert "2 files of single ranks; give one: optimizer_0_rank0.bin, optimizer_0_rank1.bin" in refused(tmp_path)
    assert read_saved(tmp_path / "optimizer_0_rank1.bin").states


def test_a_run_of_ours_gives_its_newest_intact_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    made = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda _: 1.0)
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    paths = [store.save(progress_after(n), model=model, optimizer=made, scheduler=schedule) for n in (2, 4, 6)]
    (tmp_path / "recipe.yaml").touch()
    found = read_saved(tmp_path)
    assert (found.format, found.path, found.notes) == (
        "effcli checkpoint", paths[2] / "training.pt", ("Newest: update-00000006.",)
    )  # fmt: skip
    assert (found.names_known, found.members) == (True, (("weight", "bias"),))
    names = {param: name for name, param in model.named_parameters()}
    assert inspect_states(found.states.items()) == inspect_optimizer(made, names)
    assert read_saved(paths[0]).format == "effcli checkpoint"
    (paths[2] / PROGRESS).write_text("{}")
    found = read_saved(tmp_path)
    assert found.path.parent == paths[1]
    assert found.notes == ("Newest: update-00000004.", "1 newer checkpoint passed over as damaged.")
    for path in paths[:2]:
        (path / PROGRESS).write_text("{}")
    assert "a run of effcli with only damaged checkpoints" in refused(tmp_path)


def test_a_run_without_checkpoints_and_a_comparison_say_what_to_do(tmp_path: Path) -> None:
    run = tmp_path / "adamw"
    run.mkdir()
    (run / "record.json").write_text("{}")
    assert "a run of effcli with no checkpoint, so no optimizer state (`effcli compare` keeps" in refused(run)
    (tmp_path / "comparison.json").write_text("{}")
    assert refused(tmp_path).endswith("holds the runs of a comparison; give one of them: adamw")


def test_a_folder_of_something_else_is_told_what_it_has(tmp_path: Path) -> None:
    assert "holds no optimizer state: it is empty; give a Trainer checkpoint" in refused(tmp_path)
    for name in ("config.json", "model.safetensors", "odd\nname", "vocab.txt", "z"):
        (tmp_path / name).touch()
    assert "it has config.json, model.safetensors, odd?name, vocab.txt, 1 more; give" in refused(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    try:
        assert "Permission denied" in refused(tmp_path)
    finally:
        tmp_path.chmod(0o700)
