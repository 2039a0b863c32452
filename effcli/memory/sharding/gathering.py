"""What FSDP2 gathers and reduces during a micro-batch, group by group, as events. No torch.

Read from torch 2.13, `torch/distributed/fsdp/_fully_shard/` (`_fsdp_state.py`, `_fsdp_param_group.py`,
`_fsdp_collectives.py`), for a model each layer of which is a group, while the rest is that of the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from effcli.memory.tape import END, GRADIENT, OUTPUTS, Alloc, Event, Free, Mark, MicroTape
from effcli.units import Category, ParamInfo, Phase

GATHERED = "gathered parameters"
GATHERING = "buffers of gathering"
UNREDUCED = "gradients before they are reduced"
REDUCING = "buffers of reducing"
COPIES = "copies of what gloo exchanges"

_Group = tuple[str, int]
_ROOT: _Group = ("", 0)


def with_gathering(
    micro: MicroTape, shards: Sequence[ParamInfo], world_size: int, *, copied: bool = False
) -> MicroTape:
    """Return the tape of a micro-batch with what rank 0 gathers, whose shards are whole chunks of dimension 0.

    A group is gathered into a buffer, padded, and copied out of it. The root's parameters stay from its forward pass to
    the end of the backward pass; a layer's are let go after its forward pass and gathered again in the backward pass,
    the next layer's while it computes. A buffer lives until the next one is copied out, in the backward pass until it
    is copied out itself. Whole gradients live until the backward pass leaves their group. They are copied into the
    input of a reduce-scatter then, which lives until the next one; its output are the shards of the gradients.
    `copied` says whether the backend copies what it exchanges for the time of a call, as gloo does on a CPU: NCCL does
    not.
    """
    return _Gathering(micro, shards, world_size, copied=copied).tape()


class _Gathering:
    """Walks along a tape and puts events between its own."""

    def __init__(self, micro: MicroTape, shards: Sequence[ParamInfo], world_size: int, *, copied: bool) -> None:
        self._micro, self._world_size, self._copied = micro, world_size, copied
        self._shards = {shard.name: shard for shard in shards}
        self._members = _members(micro.events, self._shards)
        self._names = {block: name for name, block in micro.gradients.items()}
        self._numbers = count(1 + max(event.block for event in micro.events if isinstance(event, Alloc)))
        self._events: list[Event] = []
        self._passed: list[_Group] = []  # layers in the order of the forward pass
        self._open: _Group | None = None  # the layer whose backward pass is going on
        self._waiting: _Group | None = None  # the one before it, whose output's gradient is complete
        self._buffers: dict[_Group, int] = {}
        self._gathered: dict[_Group, list[int]] = {}
        self._former: int | None = None  # the buffer that was copied out last
        self._whole: dict[str, int] = {}
        self._input: int | None = None
        self._gradients: dict[str, int] = {}

    def tape(self) -> MicroTape:
        """Return the tape."""
        in_backward = False
        for event in self._micro.events:
            if isinstance(event, Mark) and event.name == GRADIENT:
                self._whole[self._names[event.number]] = event.number
                continue
            if isinstance(event, Alloc) and event.block in self._names:
                self._prefetch()
                event = event._replace(category=Category.COMMUNICATION, kind=UNREDUCED)
            self._events.append(event)
            if isinstance(event, Mark):
                in_backward = in_backward or event.name == Phase.BACKWARD
                (self._go_back if in_backward else self._go_on)(event)
        self._finish()
        return replace(self._micro, events=tuple(self._events), gradients=self._gradients, copied=frozenset())

    def _go_on(self, mark: Mark) -> None:
        """Go on after a mark of the forward pass."""
        group = _group_of(mark)
        if mark.name == Phase.FORWARD:
            self._gather(_ROOT)
            self._copy_out(_ROOT)
        elif mark.name == OUTPUTS:
            self._free_former()
        elif group in self._members and mark.name.startswith(END):
            self._let_go(group)
            self._passed.append(group)
        elif group in self._members:
            self._gather(group)
            self._copy_out(group)

    def _go_back(self, mark: Mark) -> None:
        """Go on after a mark of the backward pass.

        The gradient of a layer's input is that of the output of the one before it, which begins when the layer's own
        hooks have run.
        """
        group = _group_of(mark)
        if group not in self._members:
            return
        if mark.name.startswith(END):
            self._reduce(group)
            self._open = None
            group, self._waiting = self._waiting or _ROOT, None
        elif self._open is not None:
            group, self._waiting = _ROOT, group
        if group != _ROOT:
            self._begin_backward(group)

    def _begin_backward(self, group: _Group) -> None:
        self._open = group
        self._gather(group)
        self._copy_out(group)
        self._free_former()
        if self._passed and self._passed[-1] == group:
            self._passed.pop()
        self._prefetch()

    def _prefetch(self) -> None:
        """Gather the layer whose backward pass is next; at the first gradient of all, that is the last one."""
        if self._passed:
            self._gather(self._passed[-1])

    def _gather(self, group: _Group) -> None:
        if group not in self._buffers and group not in self._gathered:
            num_bytes = sum(map(self._padded_bytes, self._members[group]))
            self._buffers[group] = self._alloc(num_bytes, GATHERING, _name(group))
            self._copy(num_bytes, group)

    def _copy_out(self, group: _Group) -> None:
        if group in self._gathered:
            return
        self._gathered[group] = [self._alloc(self._padded_bytes(name), GATHERED, name) for name in self._members[group]]
        self._free_former()  # `wait_for_unshard` holds it in a variable until it returns
        self._former = self._buffers.pop(group)

    def _free_former(self) -> None:
        self._former, former = None, self._former
        self._free(former)

    def _let_go(self, group: _Group) -> None:
        for block in self._gathered.pop(group, ()):
            self._free(block)

    def _reduce(self, group: _Group) -> None:
        """Leave a group in the backward pass: let it go, and make shards of its gradients."""
        self._let_go(group)
        self._input, former = None, self._input
        self._free(former)
        whole = {name: self._whole.pop(name) for name in self._members[group] if name in self._whole}
        if not whole:
            return
        num_bytes = sum(map(self._padded_bytes, whole))
        self._input = self._alloc(num_bytes, REDUCING, _name(group))
        for block in whole.values():
            self._free(block)
        for name in whole:
            self._gradients[name] = self._alloc(
                self._shards[name].num_bytes, "gradients", name, category=Category.GRADIENTS
            )
        self._copy(num_bytes, group)
        self._events += [Mark(GRADIENT, self._gradients[name]) for name in whole]

    def _finish(self) -> None:
        """End the backward pass: of the root, and of layers whose inputs have no gradient."""
        for group in (_ROOT, *(group for group in self._members if group != _ROOT)):
            if group in self._gathered:
                self._reduce(group)
        for block in (self._input, self._former, *self._buffers.values()):
            self._free(block)

    def _copy(self, num_bytes: int, group: _Group) -> None:
        if self._copied:
            self._free(self._alloc(num_bytes, COPIES, _name(group)))

    def _padded_bytes(self, name: str) -> int:
        return self._world_size * self._shards[name].num_bytes

    def _alloc(self, num_bytes: int, kind: str, source: str, category: Category = Category.COMMUNICATION) -> int:
        block = next(self._numbers)
        self._events.append(Alloc(block, num_bytes, category, source, kind))
        return block

    def _free(self, block: int | None) -> None:
        if block is not None:
            self._events.append(Free(block))


def _members(events: Iterable[Event], shards: Mapping[str, ParamInfo]) -> dict[_Group, list[str]]:
    """Return the names of the parameters of each layer that runs, and those of the root."""
    marked = {_group_of(event) for event in events if isinstance(event, Mark)}
    by_prefix = {f"{name}.{number}.": (name, number) for name, number in marked}
    members: dict[_Group, list[str]] = {_ROOT: []}
    for name in shards:
        parts = name.split(".")
        prefixes = (".".join([*parts[:length], ""]) for length in range(1, len(parts)))
        group = next((by_prefix[prefix] for prefix in prefixes if prefix in by_prefix), _ROOT)
        members.setdefault(group, []).append(name)
    return members


def _group_of(mark: Mark) -> _Group:
    """Return the layer that a mark is of."""
    return mark.name.removeprefix(END), mark.number


def _name(group: _Group) -> str:
    return "" if group == _ROOT else f"{group[0]}.{group[1]}"
