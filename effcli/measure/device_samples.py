"""What samples of a device add up to: the peak and the last of each amount, and the moment when most was held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from effcli.measure.device_record import Amount, DeviceMoment, NvmlFacts
from effcli.nvml.answers import CardReading

_UNKNOWN_PROCESS = "what this process holds is not known"
_NEVER_STILL = "torch's allocator took or gave back memory during every sample"
_NOT_COUNTED = "torch counts nothing of this allocator, so that what it has reserved is not known"
TOO_LITTLE = (
    "the driver says that this process holds less than torch has reserved (in a container, its number may be that of "
    "another process)"
)
MORE_THAN_USED = "the driver says that this process holds more than is in use"
_TOO_LITTLE_USED = "the driver says that less of the device is in use than torch has reserved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Bytes of the whole device in use before this process had a CUDA context; None, and `reason`, where not known."""

    used_bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the driver said, and what torch's allocator had reserved before and after that, in bytes.

    The allocator's three are None where torch counts nothing of it.
    """

    reading: CardReading
    reserved_before_bytes: int | None = None
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None

    @property
    def is_still(self) -> bool:
        """Return whether numbers of driver and allocator belong together: nothing was reserved or given back."""
        return self.reserved_bytes is not None and self.reserved_before_bytes == self.reserved_bytes

    def contradicts(self, num_bytes: int) -> bool:
        """Return whether this can't be what the process, or the whole device, holds: torch's allocator has more."""
        return num_bytes <= 0 or (self.is_still and num_bytes < (self.reserved_bytes or 0))


class _Range:
    """The highest and the last of an amount."""

    def __init__(self) -> None:
        self._peak_bytes: int | None = None
        self._last_bytes: int | None = None

    def add(self, num_bytes: int | None) -> None:
        if num_bytes is not None:
            self._peak_bytes = num_bytes if self._peak_bytes is None else max(self._peak_bytes, num_bytes)
            self._last_bytes = num_bytes

    def amount(self, reason: str | None, how: str | None = None) -> Amount:
        """Return the amount; `reason` is why there is none, `how` where the numbers come from."""
        if self._peak_bytes is None:
            return Amount(reason=reason)
        return Amount(peak_bytes=self._peak_bytes, last_bytes=self._last_bytes, how=how)


class _Account:
    """The amounts of samples, where what the process holds comes from one source."""

    def __init__(self) -> None:
        self.num_samples = self.num_still = self.num_counted = 0
        self.process, self.context, self.others = _Range(), _Range(), _Range()
        self.highest: DeviceMoment | None = None
        self._rank: tuple[int, bool, int] = (-1, False, -1)

    def add(self, sample: Sample, process_bytes: int | None, others_bytes: int | None) -> None:
        self.num_samples += 1
        self.num_still += sample.is_still
        self.num_counted += sample.reserved_bytes is not None
        used_bytes = sample.reading.used.num_bytes
        context_bytes = None
        if process_bytes is not None and sample.reserved_bytes is not None and sample.is_still:
            context_bytes = process_bytes - sample.reserved_bytes
        for amount, num_bytes in (
            (self.process, process_bytes),
            (self.context, context_bytes),
            (self.others, others_bytes),
        ):
            amount.add(num_bytes)
        held_bytes = process_bytes if process_bytes is not None else used_bytes
        rank = (-1 if held_bytes is None else held_bytes, context_bytes is not None, sample.allocated_bytes or 0)
        if rank > self._rank:
            self._rank = rank
            self.highest = DeviceMoment(
                allocated_bytes=sample.allocated_bytes,
                reserved_bytes=sample.reserved_bytes,
                context_bytes=context_bytes,
                process_bytes=process_bytes,
                others_bytes=others_bytes,
                device_bytes=used_bytes,
            )

    @property
    def never_still(self) -> bool:
        """Return whether every sample had the allocator take or give back memory."""
        return self.num_counted > 0 and not self.num_still

    @property
    def why_no_context(self) -> str:
        """Return why there is no context where the process is known."""
        return _NEVER_STILL if self.num_counted else _NOT_COUNTED

    def parts(
        self,
        *,
        process_reason: str | None = None,
        context_reason: str | None = None,
        others_reason: str | None = None,
        process_how: str | None = None,
        others_how: str | None = None,
    ) -> dict[str, Any]:
        """Return the amounts by their names in the record, each with why it is missing or how it was found."""
        return {
            "process": self.process.amount(process_reason, process_how),
            "context": self.context.amount(context_reason, process_how),
            "others": self.others.amount(others_reason, others_how),
            "highest": self.highest,
        }


class Samples:
    """Adds up samples of a device, in a few numbers however many there are.

    `context` and `others` count only where the allocator had as much reserved after the driver's numbers as before
    them. Where the driver never tells what this process holds, or once tells less than torch has reserved, that is
    taken to be what the device has in use beyond the `baseline`: only where that was read before the process had its
    context, and where it is never less than torch has reserved; `how` says so. What the whole device has in use is not
    told either where it was once less than that.
    """

    def __init__(self, baseline: Baseline | None) -> None:
        self._baseline = baseline or Baseline(reason="nothing was read before this process used the device")
        self._told, self._beyond, self._whole = _Account(), _Account(), _Account()
        self._device = _Range()
        self._last: CardReading | None = None
        self._is_told_wrong = self._is_beyond_wrong = self._is_used_wrong = False

    @property
    def num_samples(self) -> int:
        """Return how many samples were added."""
        return self._whole.num_samples

    def add(self, sample: Sample) -> None:
        """Take one more sample in."""
        used_bytes, process_bytes = sample.reading.used.num_bytes, sample.reading.process.num_bytes
        self._last = sample.reading
        self._device.add(used_bytes)
        self._whole.add(sample, None, None)
        if process_bytes is not None:
            self._is_told_wrong |= sample.contradicts(process_bytes)
            self._told.add(sample, process_bytes, _others(sample, process_bytes))
        if used_bytes is None:
            return
        self._is_used_wrong |= sample.contradicts(used_bytes)
        if self._baseline.used_bytes is not None:
            beyond_bytes = used_bytes - self._baseline.used_bytes
            self._is_beyond_wrong |= sample.contradicts(beyond_bytes)
            self._beyond.add(sample, beyond_bytes, self._baseline.used_bytes)

    def facts(self) -> NvmlFacts:
        """Return the amounts, each with the reason where it is not known; no name, no interval."""
        last = self._last
        if last is None:
            return NvmlFacts()
        facts = NvmlFacts(
            device=Amount(reason=_TOO_LITTLE_USED) if self._is_used_wrong else self._device.amount(last.used.reason),
            total_bytes=last.total.num_bytes,
            driver_reserved_bytes=last.driver_reserved.num_bytes,
            num_samples=self.num_samples,
        )
        return facts.model_copy(update=self._parts(last))

    def _parts(self, last: CardReading) -> dict[str, Any]:
        """Return the amounts that need what the process holds, and the moment when most was held."""
        if self._told.num_samples and not self._is_told_wrong:
            parts = self._told_parts(last)
        else:
            why = TOO_LITTLE if self._is_told_wrong else last.process.reason or _UNKNOWN_PROCESS
            parts = self._untold_parts(why)
        if self._is_used_wrong:
            moment: DeviceMoment = parts["highest"]
            unknown = {"device_bytes": None, "others_bytes": None}
            parts |= {"others": Amount(reason=_TOO_LITTLE_USED), "highest": moment.model_copy(update=unknown)}
        return parts

    def _told_parts(self, last: CardReading) -> dict[str, Any]:
        """Return the amounts where the driver tells what the process holds."""
        how = "with what the driver keeps for itself, which it does not tell apart"
        return self._told.parts(
            context_reason=self._told.why_no_context,
            others_reason=last.used.reason or (_NEVER_STILL if self._told.never_still else MORE_THAN_USED),
            others_how=how if last.driver_reserved.num_bytes is None else None,
        )

    def _untold_parts(self, why: str) -> dict[str, Any]:
        """Return the amounts where `why` says why the driver does not tell what the process holds."""
        why_not = self._why_not_beyond()
        if why_not is not None:
            reasons = {"context_reason": _UNKNOWN_PROCESS, "others_reason": _UNKNOWN_PROCESS}
            return self._whole.parts(process_reason=f"{why}; {why_not}", **reasons)
        return self._beyond.parts(
            context_reason=self._beyond.why_no_context,
            process_how=f"the whole device less what was in use before this run: {why}",
            others_how="what was in use before this run; what others took since counts as this process's",
        )

    def _why_not_beyond(self) -> str | None:
        """Return why the device's use beyond the baseline is not that of this process, None where it is taken so."""
        if self._baseline.used_bytes is None:
            return self._baseline.reason or "what was in use before is not known"
        if not self._beyond.num_samples:
            return "nor does it tell what the whole device has in use"
        if self._is_beyond_wrong:
            return "the whole device less what was in use before is less than torch has reserved, or nothing"
        return None


def _others(sample: Sample, process_bytes: int) -> int | None:
    """Return what the device has in use beside the process, in bytes; None where the numbers don't go together."""
    used_bytes = sample.reading.used.num_bytes
    may_have_moved = sample.reserved_bytes is not None and not sample.is_still
    if used_bytes is None or may_have_moved or used_bytes < process_bytes:
        return None
    return used_bytes - process_bytes
