"""`Sampler`: a thread that asks the driver about a device at a set interval, whatever the driver does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from effcli.errors import first_line, kind_and_line
from effcli.measure.card_readings import PATIENCE_S
from effcli.measure.cuda_allocator import Counters
from effcli.measure.device_record import Amount, NvmlFacts
from effcli.measure.device_samples import Baseline, Sample, Samples
from effcli.measure.side_thread import SideThread
from effcli.nvml.answers import CardIdentity, CardReading
from effcli.nvml.failures import NvmlUnavailableError
from effcli.units import count

SHARE = 0.01
"""Share of one processor core that sampling takes at most."""


def pause_s(interval_s: float, taken_s: float) -> float:
    """Return the seconds to wait after a sample that took some of a processor, so that it takes `SHARE` at most."""
    return max(interval_s, taken_s / SHARE)


class OpenCard(Protocol):
    """A card while the driver is open."""

    @property
    def identity(self) -> CardIdentity:
        """Return which card it is."""

    @property
    def driver_version(self) -> str | None:
        """Return the driver's version, None where it does not tell."""

    def read(self) -> CardReading:
        """Return what the driver says now, of this process too.

        Raises:
            DriverLostError: the driver, or the card, is gone.
        """


class Sampler:
    """Reads a device from `start` to `stop`, in a thread of its own that no driver call can make the run wait for.

    The thread opens the driver, reads at once, then every `interval_s` seconds, once more when it is told to stop, and
    closes the driver: once `stop` has returned, nothing is open and no thread is left. A fifth of a second is often
    enough: what torch reserves, and with it what the process holds, grows in steps that stay; torch's own peaks miss
    nothing. The thread measures the processor time of each sample, and waits longer after an expensive one, so that
    sampling takes no more than `SHARE` of a core. A driver that does not answer within `patience_s` seconds is left to
    its thread, a daemon, and never closed while that uses it. `counters` are None where torch counts nothing of its
    allocator: then there is no context.
    """

    def __init__(
        self,
        open_card: Callable[[], AbstractContextManager[OpenCard]],
        counters: Counters | None,
        *,
        interval_s: float,
        baseline: Baseline | None,
        patience_s: float = PATIENCE_S,
        processor_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._open_card, self._counters = open_card, counters
        self._interval_s, self._patience_s = interval_s, patience_s
        self._processor_clock = processor_clock
        self._samples = Samples(baseline)
        self._identity: CardIdentity | None = None
        self._driver_version: str | None = None
        self._reason: str | None = None
        self._failure: str | None = None
        self._num_failed = 0
        self._first_s = self._latest_s = 0.0
        self._is_over = threading.Event()
        self._lock = threading.Lock()  # never held while the driver is asked
        self._is_left = False
        self._thread = SideThread(self._work, "effcli-nvml")
        self._processor_s = 0.0

    def start(self) -> None:
        """Begin to sample; does not wait for the driver."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the system allows no more threads
            self._give_up(first_line(error))

    def stop(self) -> None:
        """Read a last time and close the driver. May be called more than once, and without `start`."""
        self._is_over.set()
        if not self._is_left and not self._thread.ends_within(self._patience_s):
            self._is_left = True
            self._give_up(f"the driver did not answer within {self._patience_s:g} s")

    @property
    def processor_s(self) -> float:
        """Return the seconds of processor time that the thread has taken, opening and closing the driver included."""
        return self._processor_s

    def facts(self) -> NvmlFacts:
        """Return what was read so far."""
        with self._lock:
            facts, reason, num_samples = self._samples.facts(), self._reason, self._samples.num_samples
            spanned_s = self._latest_s - self._first_s
        identity = self._identity
        update: dict[str, Any] = {
            "name": identity.name if identity else None,
            "uuid": identity.uuid if identity else None,
            "driver_version": self._driver_version,
            "interval_s": self._interval_s,
            "mean_interval_s": spanned_s / (num_samples - 1) if num_samples > 1 else None,
            "num_failed": self._num_failed,
            "reason": reason,
        }
        if not num_samples:
            nothing = Amount(reason=reason or self._failure or "the run ended before a first sample")
            update |= dict.fromkeys(("device", "process", "context", "others"), nothing)
            update["reason"] = nothing.reason
        return facts.model_copy(update=update)

    def _work(self) -> None:
        try:
            with self._open_card() as card:
                self._identity, self._driver_version = card.identity, card.driver_version
                self._sample_until_over(card)
        except NvmlUnavailableError as error:
            self._give_up(error.reason)
        except Exception as error:  # a fault of the reading must not end the run
            self._give_up(kind_and_line(error))
        finally:
            self._processor_s = self._processor_clock()

    def _sample_until_over(self, card: OpenCard) -> None:
        is_last = False
        before_s = self._processor_clock()
        while not is_last:
            is_last = self._is_over.is_set()
            self._sample(card)
            now_s = self._processor_clock()
            taken_s, before_s = now_s - before_s, now_s  # with what the wait before this sample took
            self._is_over.wait(pause_s(self._interval_s, taken_s))

    def _sample(self, card: OpenCard) -> None:
        """Take one sample.

        Raises:
            NvmlUnavailableError: the driver, or the card, is gone.
        """
        try:
            before = self._counters.read() if self._counters else None
            reading = card.read()
            after = self._counters.read() if self._counters else None
        except NvmlUnavailableError:
            raise
        except Exception as error:  # whatever torch says once CUDA has failed
            with self._lock:
                self._num_failed += 1
                self._failure = kind_and_line(error)
            return
        sample = Sample(
            reading=reading,
            reserved_before_bytes=before.reserved_bytes if before else None,
            reserved_bytes=after.reserved_bytes if after else None,
            allocated_bytes=after.allocated_bytes if after else None,
        )
        now_s = time.monotonic()
        with self._lock:
            self._first_s = self._first_s or now_s
            self._latest_s = now_s
            self._samples.add(sample)

    def _give_up(self, why: str) -> None:
        """Keep why there will be no more samples."""
        with self._lock:
            self._reason = self._after(why)

    def _after(self, why: str) -> str:
        num_samples = self._samples.num_samples
        return f"{why}, after {count(num_samples, 'sample')}" if num_samples else why
