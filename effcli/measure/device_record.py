"""What a CUDA device was seen to hold during a run: torch's allocator and the NVIDIA driver, told apart."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from effcli.facts import Fact

Doing = Literal["loading", "forward", "backward", "step", "evaluation"]
"""Parts of a run in which memory is counted, or may run out."""

OF_UPDATES: tuple[Doing, ...] = ("forward", "backward", "step")
"""The parts of an update, which are planned."""


class Amount(Fact):
    """An amount of device memory over a run: the highest and the last that was read.

    Both are None where nothing could be read, and `reason` then says why in one line; never 0 for unknown. `how` says
    where the numbers come from where that is second best, such as the whole device less what was used before.
    """

    peak_bytes: int | None = None
    last_bytes: int | None = None
    reason: str | None = None
    how: str | None = None


class PhasePeak(Fact):
    """The most that one part of a run took in torch's CUDA allocator, over all its times."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int


class AllocatorFacts(Fact):
    """What torch's CUDA allocator counted: tensors (allocated) and what it holds of the device (reserved).

    `torch.cuda.memory_summary()` calls them "Allocated memory" and "GPU reserved memory"; its peaks begin anew during a
    run, as parts of a run are counted one by one. Allocated bytes are those of whole blocks, "Requested memory" is not.

    `first_step_change_bytes` is what the allocated bytes rose by around the first optimizer step, around the first two
    where states are paged; None where that step did not create the state, and `first_step_reason` says why.
    `cublas_workspace_bytes` are among the allocated, None where they could not be told (`cublas_reason`).
    `phases` are of all updates where `num_updates_seen` is None, else of that many; the peaks are of all in any case.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    phases: dict[Doing, PhasePeak] = Field(default_factory=dict)
    num_updates_seen: int | None = None
    first_step_change_bytes: int | None = None
    first_step_reason: str | None = None
    cublas_workspace_bytes: int | None = None
    cublas_reason: str | None = None

    @property
    def of_updates(self) -> PhasePeak | None:
        """Return the most that updates took, which is what a plan speaks of; an evaluation may take more.

        It is all that was counted where nothing was counted part by part; None where no update was. Where parts are
        known of some updates alone, an amount that nothing else reached was that of an update.
        """
        whole = PhasePeak(peak_allocated_bytes=self.peak_allocated_bytes, peak_reserved_bytes=self.peak_reserved_bytes)
        own = [self.phases[part] for part in OF_UPDATES if part in self.phases] if self.phases else [whole]
        others = [peak for part, peak in self.phases.items() if part not in OF_UPDATES]
        if not own:
            return None

        def most(field: str) -> int:
            elsewhere = max((getattr(peak, field) for peak in others), default=0)
            is_own = self.num_updates_seen is not None and getattr(self, field) > elsewhere
            return int(getattr(self, field) if is_own else max(getattr(peak, field) for peak in own))

        return PhasePeak(
            peak_allocated_bytes=most("peak_allocated_bytes"), peak_reserved_bytes=most("peak_reserved_bytes")
        )


class DeviceMoment(Fact):
    """What was read together: the sample in which this process, or else the device, held the most.

    `context_bytes` are `process_bytes` less `reserved_bytes`: CUDA's context, loaded kernels, and whatever else
    lies outside torch's allocator. `others_bytes` are `device_bytes` less `process_bytes` and what the driver keeps.
    None where a part could not be read.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    process_bytes: int | None = None
    others_bytes: int | None = None
    device_bytes: int | None = None


class OthersFacts(Fact):
    """What other processes hold of a device at one moment, `num_bytes`; None, with the `reason`, where not known.

    `with_driver` says that what the driver keeps for itself is among them, as it does not tell that apart.
    `device_bytes` are all that is in use, this process's included; None where that is not known either.
    """

    num_bytes: int | None = None
    device_bytes: int | None = None
    with_driver: bool = False
    reason: str | None = None


class NvmlFacts(Fact):
    """What the NVIDIA driver said of the device, sampled every `interval_s` seconds while the run lasted.

    `reason` says why there is no reading at all, or why reading ended before the run did. `device` is all that is in
    use, `process` what this process holds, `context` that less what torch's allocator had reserved at the same moment,
    `others` what is left of the device. `driver_reserved_bytes` are what the driver keeps for itself, None where it
    does not tell; they are no part of `device`, which is what nvidia-smi shows in use: since drivers 510 without what
    the driver keeps, before them with it. `mean_interval_s` is what became of `interval_s`: a sample that takes
    much of a processor is followed by a longer wait. `num_failed` samples brought nothing and are not in `num_samples`.
    """

    name: str | None = None
    uuid: str | None = None
    driver_version: str | None = None
    total_bytes: int | None = None
    driver_reserved_bytes: int | None = None
    interval_s: float | None = None
    mean_interval_s: float | None = None
    num_samples: int = 0
    num_failed: int = 0
    device: Amount = Amount()
    process: Amount = Amount()
    context: Amount = Amount()
    others: Amount = Amount()
    highest: DeviceMoment | None = None
    reason: str | None = None
