"""The optimizer states that DeepSpeed's ZeRO writes: flat partitions, a file for each rank.

Layout from deepspeed 0.19.8: `runtime/zero/stage_1_and_2.py`, `runtime/bf16_optimizer.py`, `runtime/zero/stage3.py` and
`utils/zero_to_fp32.py`. In stages 1 and 2, `param_slice_mappings` say which part of a rank's flat tensor is whose. In
stage 3 a rank's flat tensors are the parameters' shares one after another, `ceil(elements / ranks)` of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from effcli.errors import DataError
from effcli.saved.checks import RefusedPickleError, checked_size, numel_of
from effcli.saved.mapped import MappedFile, map_file
from effcli.saved.optimizer import SavedOptimizer
from effcli.saved.state_dicts import plain_groups
from effcli.saved.torch_file import load_torch_file
from effcli.storage import storages
from effcli.units import count, format_bytes

SHARDS = "*_optim_states.pt"
PADDING = "(padding)"
"""Label of the elements that fill up a flat tensor and belong to no parameter."""
_INNER = ("base_optimizer_state", "optimizer_state_dict")
_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups_flat")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fragment:
    """Which elements of a rank's flat tensor are whose."""

    name: str
    start: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """The states of one rank by number, its groups, whose elements they are where that is known, its fp32 weights."""

    rank: int
    states: dict[int, Mapping[str, Any]]
    groups: list[Any]
    fragments: list[list[_Fragment]] | None
    masters: list[torch.Tensor]
    num_ranks: int


def is_shard(value: Any) -> bool:
    """Return whether a file's content is what one rank of ZeRO writes."""
    own = value.get("optimizer_state_dict") if isinstance(value, Mapping) else None
    return isinstance(own, Mapping) and any(key in own for key in _INNER) and any(key in own for key in _MASTERS)


def read_deepspeed(paths: Sequence[Path], path: Path) -> SavedOptimizer:
    """Return the state over all ranks' files; `path` is the folder, or the one file, that was asked for.

    Raises:
        DataError: a file is damaged, or laid out in another way.
    """
    files = [map_file(each) for each in sorted(paths, key=_rank)]
    shapes, unread = _parameter_shapes(path if path.is_dir() else path.parent)
    shards = [_shard(file, shapes) for file in files]
    states: dict[str, dict[str, Any]] = {}
    for shard in shards:
        for label, key, value in _pieces(shard):
            states.setdefault(label, {}).setdefault(key, []).append(value)
    known = all(shard.fragments is not None for shard in shards)
    groups = shards[0].groups
    return SavedOptimizer(
        format="DeepSpeed ZeRO optimizer shards",
        path=path,
        states={label: {key: _single(held) for key, held in state.items()} for label, state in states.items()},
        groups=plain_groups(groups),
        members=_members(shards, len(groups)) if known else ((),) * len(groups),
        names_known=known,
        holds_whole_tensors=False,
        shards=len(shards),
        notes=tuple(_notes(shards, states, unread, known=known)),
        files=files,
    )


def _single(held: list[Any]) -> Any:
    return held[0] if len(held) == 1 else held


def _rank(path: Path) -> tuple[int, ...]:
    """Return the numbers of the ranks in a file's name, data-parallel first."""
    return tuple(int(number) for number in re.findall(r"rank_(\d+)", path.name))


def _shard(file: MappedFile, shapes: list[dict[str, tuple[int, ...]]]) -> _Shard:
    value = load_torch_file(file).value
    if not is_shard(value):
        raise DataError(f"'{file.path}' is no optimizer shard of DeepSpeed's ZeRO")
    own = value["optimizer_state_dict"]
    inner = next(own[key] for key in _INNER if key in own)
    masters = next(own[key] for key in _MASTERS if key in own)
    masters = [each for each in masters if isinstance(each, torch.Tensor)] if isinstance(masters, list | tuple) else []
    partitions = own.get("partition_count", 1)
    counts = partitions if isinstance(partitions, list) else [partitions]
    num_ranks = max([1, *(count for count in counts if type(count) is int)])
    rank = _rank(file.path)[0] if _rank(file.path) else 0
    try:
        states = dict(enumerate(inner)) if isinstance(inner, list) else dict(inner["state"])
        groups = [] if isinstance(inner, list) else [dict(group) for group in inner["param_groups"]]
        fragments = _fragments(own.get("param_slice_mappings"))
        if fragments is None and "fp32_flat_groups" in own:
            fragments = _shares(shapes, [each.numel() for each in masters], rank, num_ranks)
        if not all(isinstance(number, int) and isinstance(state, Mapping) for number, state in states.items()):
            raise TypeError
    except (KeyError, TypeError, ValueError, AttributeError, RefusedPickleError) as error:
        raise DataError(f"'{file.path}' is damaged, or of a version of DeepSpeed that lays it out otherwise") from error
    return _Shard(rank=rank, states=states, groups=groups, fragments=fragments, masters=masters, num_ranks=num_ranks)


def _fragments(mappings: Any) -> list[list[_Fragment]] | None:
    if not isinstance(mappings, list) or not any(mappings):
        return None
    groups = []
    for mapping in mappings:
        found = [_Fragment(name=str(name), start=at.start, num_elements=at.numel) for name, at in mapping.items()]
        for each in found:
            checked_size(each.start)
            checked_size(each.num_elements)
        groups.append(sorted(found, key=lambda each: each.start))
    return groups


def _parameter_shapes(folder: Path) -> tuple[list[dict[str, tuple[int, ...]]], str]:
    """Return the shapes of the parameters by name, group by group, and why there are none where a file is damaged."""
    path = next(iter(sorted(folder.glob("*_model_states.pt"), key=_rank)), None)
    if path is None:
        return [], ""
    try:
        value = load_torch_file(map_file(path)).value
    except DataError as error:
        return [], str(error)
    shapes = value.get("param_shapes") if isinstance(value, Mapping) else None
    if not isinstance(shapes, list) or not all(isinstance(group, Mapping) for group in shapes):
        return [], ""
    return [{str(name): tuple(shape) for name, shape in group.items()} for group in shapes], ""


def _shares(
    shapes: list[dict[str, tuple[int, ...]]], lengths: list[int], rank: int, num_ranks: int
) -> list[list[_Fragment]] | None:
    """Return whose share each element of stage 3's flat tensors is; None where the numbers don't come out."""
    wanted = [(name, numel_of(shape)) for group in shapes for name, shape in group.items()]
    groups: list[list[_Fragment]] = []
    for length in lengths:
        start, found = 0, []
        while wanted and start + (share := -(-wanted[0][1] // num_ranks)) <= length:
            name, elements = wanted.pop(0)
            own = min(max(elements - rank * share, 0), share)  # the last ranks' shares are filled up
            found.append(_Fragment(name=name, start=start, num_elements=own))
            start += share
        groups.append(found)
        if start != length:
            return None
    return groups if groups and not wanted else None


def _pieces(shard: _Shard) -> Iterator[tuple[str, str, Any]]:
    """Yield label, state name and value of what a rank holds, flat tensors cut by the parameters they belong to."""
    for number, state in shard.states.items():
        fragments = (shard.fragments or [])[number : number + 1]
        for key, value in state.items():
            if not fragments or not isinstance(value, torch.Tensor) or value.dim() != 1:
                label = f"(group {number})" if fragments else f"rank {shard.rank}, part {number}"
                yield label, str(key), value
                continue
            end = 0
            for each in fragments[0]:
                if each.start > end:
                    yield PADDING, str(key), _cut(value, end, each.start)
                yield each.name, str(key), _cut(value, each.start, each.start + each.num_elements)
                end = max(end, each.start + each.num_elements)
            if end < value.numel():
                yield PADDING, str(key), _cut(value, end, value.numel())


def _cut(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements of a flat tensor as a tensor of their own: not a view, which would hold all bytes."""
    if not 0 <= start <= stop <= flat.numel():
        raise DataError("a DeepSpeed shard is damaged: a parameter's elements lie behind its flat tensor")
    width = flat.element_size()
    base = flat.storage_offset()
    held = flat.untyped_storage()[(base + start) * width : (base + stop) * width]
    part = torch.empty(0, dtype=flat.dtype)
    part.set_(held, 0, (stop - start,), (1,))
    return part


def _members(shards: Sequence[_Shard], num_groups: int) -> tuple[tuple[str, ...], ...]:
    names: list[dict[str, None]] = [{} for _ in range(num_groups)]
    for shard in shards:
        for group, fragments in zip(names, shard.fragments or (), strict=False):
            group.update(dict.fromkeys(each.name for each in fragments))
    return tuple(tuple(group) for group in names)


def _notes(shards: Sequence[_Shard], states: Mapping[str, Any], unread: str, *, known: bool) -> Iterator[str]:
    """Yield what should be said; `unread` is why the file that tells the parameters' shapes was not read."""
    expected = max(shard.num_ranks for shard in shards)
    if len(shards) < expected:
        yield f"{len(shards)} of {expected} ranks' files are read; the state of the others is not counted."
    if not known:
        yield "Its flat partitions don't say which elements are whose, so amounts are by partition, not by parameter."
        if unread:
            yield f"The file that tells the parameters' shapes is left out: {unread}."
    padding = sum(each.numel() for held in states.get(PADDING, {}).values() for each in held)
    if padding:
        yield f"{count(padding, 'element')} of state fill up flat partitions and belong to no parameter ('{PADDING}')."
    masters = [each for shard in shards for each in shard.masters]
    if masters:
        held = {storage.identity: storage.num_bytes for each in masters for storage in storages(each)}
        yield f"Beside the state lie fp32 weights of {format_bytes(sum(held.values()))}, which are not counted."
