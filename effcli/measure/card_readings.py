"""A CUDA device as the NVIDIA driver has it: opened for as long as it is sampled, or read a single time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from effcli.errors import first_line, kind_and_line
from effcli.measure.side_thread import SideThread
from effcli.nvml.answers import CardIdentity, CardReading
from effcli.nvml.session import Card, NvmlSession, NvmlUnavailableError, find_card

PATIENCE_S = 5.0
"""Seconds that a run waits for an answer; the driver's answers take milliseconds."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCard:
    """A card of an open driver, asked about this process; `driver_version` is None where the driver does not tell."""

    card: Card
    driver_version: str | None

    @property
    def identity(self) -> CardIdentity:
        """Return which card it is."""
        return self.card.identity

    def read(self) -> CardReading:
        """Return what the driver says now, of this process too.

        Raises:
            DriverLostError: the driver, or the card, is gone.
        """
        return self.card.read(os.getpid())


@contextmanager
def opened(card_names: Callable[[], Sequence[str]]) -> Iterator[OpenedCard]:
    """Open the driver and find the card.

    Raises:
        NvmlUnavailableError: there is none.
    """
    with NvmlSession.open() as session:
        yield OpenedCard(card=find_card(session, card_names()), driver_version=session.driver_version)


def read_once(
    card_names: Callable[[], Sequence[str]],
    told: Callable[[CardReading], Found],
    untold: Callable[[str], Found],
    *,
    patience_s: float,
    name: str,
) -> Found:
    """Return what `told` makes of one reading, or `untold` of the reason why there is none.

    Raises nothing of the driver's or torch's, and waits `patience_s` seconds at most, in a thread of this `name`.
    """
    found = [untold(f"the driver did not answer within {patience_s:g} s")]

    def read() -> None:
        try:
            with opened(card_names) as card:
                reading = card.read()
            found.append(told(reading))
        except NvmlUnavailableError as error:
            found.append(untold(error.reason))
        except Exception as error:  # a fault of the reading must not end the run, nor hide what is being reported
            found.append(untold(kind_and_line(error)))

    thread = SideThread(read, name)
    try:
        thread.start()
        thread.ends_within(patience_s)
    except RuntimeError as error:  # the system allows no more threads
        return untold(first_line(error))
    except BaseException:  # raised by a signal's handler
        thread.ends_within(patience_s)
        raise
    return found[-1]
