"""Which part of a folder holds the optimizer state, by the names that each tool gives its files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from effcli.engines.checkpoint import FILES, TRAINING, CheckpointStore
from effcli.errors import DataError
from effcli.run_folder import COMPARISON, RECIPE, RECORD, RunFolder
from effcli.saved.deepspeed import SHARDS
from effcli.saved.mapped import unreadable
from effcli.saved.metadata import METADATA
from effcli.saved.optimizer import READ
from effcli.saved.safe_text import safe
from effcli.units import count, listed

_OPTIMIZER = re.compile(r"optimizer(?:_(\d+))?\.(?:pt|bin)")
_SHARDED = re.compile(r"optimizer(?:_(\d+))?")
_RANKS = re.compile(r"(?:optimizer_\d+_rank\d+\.bin|rank\d+-of-\d+-optimizer\.pt)")
_CHECKPOINT = re.compile(r"checkpoint[-_](\d+)")
_STEP = re.compile(r"global_step(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """What to read: a file, a distributed checkpoint or the shards in a folder; `format` and `notes` say more of it."""

    path: Path
    kind: str = "file"
    format: str | None = None
    notes: tuple[str, ...] = ()


Look = Callable[[Path, list[str]], Location | None]


def find_in_folder(folder: Path) -> Location:
    """Return what holds the optimizer state of a folder.

    Raises:
        DataError: nothing does, or several things do.
    """
    return _found(folder, (*_LOOKS, _output))


def _found(folder: Path, looks: Sequence[Look]) -> Location:
    names = _names(folder)
    for look in looks:
        place = look(folder, names)
        if place is not None:
            return place
    raise DataError(f"'{folder}' holds no optimizer state: {_instead(folder, names)}; give {READ}")


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error


def _sharded(folder: Path, names: list[str]) -> Location | None:
    if METADATA in names:
        return Location(path=folder, kind="distributed")
    if any(Path(name).match(SHARDS) for name in names):
        return Location(path=folder, kind="deepspeed")
    return None


def _own(folder: Path, names: list[str]) -> Location | None:
    """Return the file of a checkpoint of ours, or the newest intact one of a run."""
    if set(FILES) <= set(names):
        return Location(path=folder / TRAINING, format="effcli checkpoint")
    if COMPARISON in names:
        runs = [name for name in names if os.path.isfile(folder / name / RECORD)]
        raise DataError(
            f"'{folder}' holds the runs of a comparison; give one of them: {listed(runs, 8) or 'none is left'}"
        )
    if RECIPE not in names and RECORD not in names:
        return None
    run = RunFolder(path=folder)
    store = CheckpointStore(run.checkpoints, keep=1)
    paths, newest = store.paths(), store.newest_intact_path()
    if newest is None:
        without = "no checkpoint, so no optimizer state (`effcli compare` keeps those of complete runs with --keep 1)"
        what = "only damaged checkpoints" if paths else without
        raise DataError(f"'{folder}' is a run of effcli with {what}")
    passed = len(paths) - 1 - paths.index(newest)
    damaged = (f"{count(passed, 'newer checkpoint')} passed over as damaged.",) if passed else ()
    return Location(path=newest / TRAINING, format="effcli checkpoint", notes=(f"Newest: {newest.name}.", *damaged))


def _whole(folder: Path, names: list[str]) -> Location | None:
    """Return the file that Trainer or accelerate writes, or the folder that they write for FSDP."""
    trainer = "trainer_state.json" in names
    files = _numbered(names, _OPTIMIZER)
    folders = [name for name in _numbered(names, _SHARDED) if os.path.isfile(folder / name / METADATA)]
    found = files or folders
    if not found:
        return None
    others = (
        f"It holds {len(found)} optimizers; this is '{found[0]}'. Give the path of another: {listed(found[1:], 6)}."
    )
    return Location(
        path=folder / found[0],
        kind="file" if files else "distributed",
        format="Trainer checkpoint" if trainer else "accelerate state" if "optimizer.bin" in names or folders else None,
        notes=(others,) if len(found) > 1 else (),
    )


def _numbered(names: list[str], pattern: re.Pattern[str]) -> list[str]:
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    return [match[0] for match in sorted(matches, key=lambda match: int(match[1] or 0))]


def _ranks(folder: Path, names: list[str]) -> Location | None:
    """Refuse files of single ranks: one of them is not the optimizer."""
    found = [name for name in names if _RANKS.fullmatch(name)]
    if not found:
        return None
    raise DataError(
        f"'{folder}' holds the state in {count(len(found), 'file')} of single ranks; give one: {listed(found, 4)}"
    )


def _deepspeed(folder: Path, names: list[str]) -> Location | None:
    """Return the newest folder that DeepSpeed wrote into this one, as its file `latest` says."""
    holding = [name for name in names if os.path.isdir(folder / name) and _holds_shards(folder / name)]
    if not holding:
        return None
    latest = ""
    if os.path.isfile(folder / "latest"):
        with (folder / "latest").open("rb") as file:
            latest = file.read(256).decode("utf-8", "replace").strip()
    chosen = latest if latest in holding else max(holding, key=lambda name: _number(_STEP, name))
    notes = (f"Newest of {len(holding)}: {chosen}.",) if len(holding) > 1 else ()
    return Location(path=folder / chosen, kind="deepspeed", notes=notes)


def _holds_shards(folder: Path) -> bool:
    try:
        return next(folder.glob(SHARDS), None) is not None
    except OSError:
        return False


def _output(folder: Path, names: list[str]) -> Location | None:
    """Return the optimizer of the newest checkpoint that has one in a folder of checkpoints."""
    if os.path.isdir(folder / "checkpoints"):
        inner = folder / "checkpoints"
        names = [f"checkpoints/{name}" for name in _names(inner)] + names
    checkpoints = [name for name in names if _CHECKPOINT.fullmatch(Path(name).name) and os.path.isdir(folder / name)]
    if not checkpoints:
        return None
    checkpoints.sort(key=lambda name: -_number(_CHECKPOINT, Path(name).name))
    for passed, name in enumerate(checkpoints):
        with suppress(DataError):
            place = _found(folder / name, _LOOKS)
            note = f"Newest of {count(len(checkpoints), 'checkpoint')}: {Path(name).name}."
            if passed:
                note = f"Newest with an optimizer state of {count(len(checkpoints), 'checkpoint')}: {Path(name).name}."
            return Location(path=place.path, kind=place.kind, format=place.format, notes=(note, *place.notes))
    return _found(folder / checkpoints[0], _LOOKS)  # which says why none of them has any


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else -1


_LOOKS: tuple[Look, ...] = (_sharded, _own, _whole, _ranks, _deepspeed)


def _instead(folder: Path, names: list[str]) -> str:
    if not names:
        return "it is empty"
    if "trainer_state.json" in names:
        return "it is a Trainer checkpoint that was saved without its optimizer"
    return f"it has {', '.join(_shown(names))}"


def _shown(names: list[str]) -> Iterator[str]:
    for name in names[:4]:
        yield safe(name, 40)
    if len(names) > 4:
        yield f"{len(names) - 4} more"
