"""A card, or a MIG instance of one, and what the driver says of its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from effcli.nvml.answers import Answer, CardIdentity, CardReading
from effcli.nvml.failures import NOT_REPORTED, NvmlReturn, code_of, explain, unless_lost
from effcli.units import count

_NOT_AVAILABLE = 2**64 - 1
"""NVML's "value not available"; `pynvml` turns it into None in lists of processes only."""

_ANY_INSTANCE = 2**32 - 1
"""What stands for "no MIG instance" in the driver's list of processes."""

_HIGHEST_ID = 2**22
"""No process has a higher id: PID_MAX_LIMIT of 64-bit Linux."""

_DIVIDED = (
    "no permission to ask about a whole card that is divided into MIG instances; "
    "name the instance in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them)"
)
_WHICH_INSTANCE = (
    "the card is divided into MIG instances, and which of them this process has is not known; name it in "
    "CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them)"
)
_SHARED_MEMORY = (
    "the driver does not count this card's memory (not supported; so it is where the card shares the system's memory, "
    "as on GB10 and Jetson)"
)
_NO_VERSION_2 = frozenset(
    {NvmlReturn.NOT_SUPPORTED, NvmlReturn.FUNCTION_NOT_FOUND, NvmlReturn.ARGUMENT_VERSION_MISMATCH}
)
"""Codes of a driver that has no version 2 of the answer about memory."""

_NOT_APART = "the driver doesn't tell it apart: it is part of what is in use"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device that the driver knows, found by its identifier; good while the session it comes from is open."""

    identity: CardIdentity
    binding: Any = field(repr=False)
    handle: Any = field(repr=False)

    def read(self, pid: int) -> CardReading:
        """Return the device's memory now, in bytes, and what the process with this id holds of it.

        May be called from several threads.

        Raises:
            DriverLostError: driver or card are gone; nothing else is raised.
        """
        total, used, driver_reserved = self._memory()
        process = self._process(pid)
        if process.num_bytes is not None and total.num_bytes is not None and process.num_bytes > total.num_bytes:
            process = Answer(reason="the driver's answer can't be right: the process holds more than the card has")
        return CardReading(total=total, used=used, driver_reserved=driver_reserved, process=process)

    def _memory(self) -> tuple[Answer, Answer, Answer]:
        """Return total, used and what the driver keeps.

        That of a whole card that is divided is of no use, also to root, who is told it: a process has an instance.
        """
        if self.identity.mig_enabled:
            unknown = Answer(reason=_WHICH_INSTANCE)
            return unknown, unknown, unknown
        try:
            answer, kept = self._memory_info()
            return _sane(_amount(answer.total), _amount(answer.used), kept)
        except Exception as error:
            unless_lost(error)
            unknown = Answer(reason=self._explain(error, not_supported=_SHARED_MEMORY))
            return unknown, unknown, unknown

    def _memory_info(self) -> tuple[Any, Answer]:
        """Return version 2 of the driver's answer, or else version 1, and what the driver keeps.

        A failure that may pass does not lead to version 1, whose `used` means more: a peak would mix the two.

        Raises:
            Exception: whatever `pynvml` raises.
        """
        try:
            answer = self.binding.nvmlDeviceGetMemoryInfo(self.handle, version=self.binding.nvmlMemory_v2)
            return answer, _amount(answer.reserved)
        except Exception as error:
            if not isinstance(error, (AttributeError, TypeError)) and code_of(error) not in _NO_VERSION_2:
                raise
        return self.binding.nvmlDeviceGetMemoryInfo(self.handle), Answer(reason=_NOT_APART)

    def _process(self, pid: int) -> Answer:
        """Return what a process holds: the larger of its amounts as a compute and as a graphics process.

        Either list gives all that it holds of the device. On a whole card that is divided, a process has an entry for
        each instance, and they add up. Clients of MPS may be in a list of their own.
        """
        listed: list[Any] = []
        own: list[Any] = []
        failure: Exception | None = None
        for kind in ("Compute", "Graphics", "MPSCompute"):
            if own and kind == "MPSCompute":
                break
            try:
                listed += self._listed(kind)
            except Exception as error:
                unless_lost(error)
                failure = error if kind == "Compute" else failure
            own = [process for process in listed if process.pid == pid and self._is_here(process)]
        if own:
            return _held(own)
        if failure is not None:
            return Answer(reason=self._explain(failure))
        return Answer(reason=_not_listed(pid, len({process.pid for process in listed})))

    def _listed(self, kind: str) -> list[Any]:
        """Return the driver's list of processes of a kind: the newest version of it, or else version 2.

        The first drivers of series 535 have longer entries in version 3 than all others, and some releases of `pynvml`
        do as they do (nvitop's pull request 79). Where the two differ, entries are shifted, and what is read as process
        ids is none; version 2 never changed.
        """
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        try:
            processes = self._list(name)
        except Exception as error:
            if code_of(error) != NvmlReturn.FUNCTION_NOT_FOUND:
                raise
            return self._list(f"{name}_v2")
        if not all(0 < process.pid <= _HIGHEST_ID for process in processes):
            return self._list(f"{name}_v2")
        return processes

    def _list(self, function: str) -> list[Any]:
        """Return what a function lists; asked again where processes were added while it was read."""
        for _ in range(3):
            try:
                return list(getattr(self.binding, function)(self.handle))
            except Exception as error:
                if code_of(error) != NvmlReturn.INSUFFICIENT_SIZE:
                    raise
                failure = error
        raise failure

    def _is_here(self, process: Any) -> bool:
        """Tell whether an entry belongs to this device: a MIG instance may list those of its neighbours."""
        ids = _instance_of(process)
        return self.identity.instance is None or all(
            given in (own, _ANY_INSTANCE) for given, own in zip(ids, self.identity.instance, strict=True)
        )

    def _explain(self, error: Exception, *, not_supported: str | None = None) -> str:
        """Return the reason for this device; a divided card and shared memory have their own."""
        if code_of(error) == NvmlReturn.NO_PERMISSION and self.identity.mig_enabled:
            return _DIVIDED
        if code_of(error) == NvmlReturn.NOT_SUPPORTED and not_supported is not None:
            return not_supported
        return explain(error)


def _instance_of(process: Any) -> tuple[int, int]:
    """Return the ids of the MIG instance of a listed process; old bindings have none."""
    return (
        getattr(process, "gpuInstanceId", _ANY_INSTANCE),
        getattr(process, "computeInstanceId", _ANY_INSTANCE),
    )


def _amount(value: int | None) -> Answer:
    if value is None or value >= _NOT_AVAILABLE:
        return Answer(reason=NOT_REPORTED)
    return Answer(num_bytes=int(value))


def _sane(total: Answer, used: Answer, kept: Answer) -> tuple[Answer, Answer, Answer]:
    """Return the three, without those that can't be right."""
    if total.num_bytes == 0:
        unknown = Answer(reason="the driver says that the card has no memory; it may share the system's")
        return unknown, unknown, unknown
    if total.num_bytes is not None:
        used, kept = (
            Answer(reason="the driver's answer can't be right: more than the card has")
            if part.num_bytes is not None and part.num_bytes > total.num_bytes
            else part
            for part in (used, kept)
        )
    return total, used, kept


def _held(entries: Iterable[Any]) -> Answer:
    """Return what a process holds in all its entries: per instance the largest that is reported."""
    largest: dict[tuple[int, int], int] = {}
    for entry in entries:
        amount = _amount(entry.usedGpuMemory).num_bytes
        if amount is not None:
            instance = _instance_of(entry)
            largest[instance] = max(amount, largest.get(instance, 0))
    if not largest:
        return Answer(reason=NOT_REPORTED)
    held = sum(largest.values())
    if held == 0:  # a process that is listed has a context, which is never empty
        return Answer(reason="the driver lists this process with 0 bytes, which can't be right")
    return Answer(num_bytes=held)


def _not_listed(pid: int, num_listed: int) -> str:
    seen = f"lists {count(num_listed, 'other')}" if num_listed else "lists none"
    return (
        f"process {pid} is not among those that the driver lists on this card (it {seen}): in a container it may see "
        "other process ids; docker run --pid=host"
    )
