"""What other processes hold of a CUDA device, asked of the NVIDIA driver once. No torch by itself."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from effcli.errors import first_line
from effcli.measure.device_record import OthersFacts
from effcli.measure.sampler import PATIENCE_S
from effcli.nvml.answers import CardReading
from effcli.nvml.session import NvmlSession, NvmlUnavailableError, find_card

if TYPE_CHECKING:
    from effcli.measure.device_monitor import CudaDevice

_CONTRADICTS = "the driver says that this process holds more than is in use"


def held_by_others(watched: CudaDevice | None, *, patience_s: float = PATIENCE_S) -> OthersFacts | None:
    """Return what the driver says now of other processes; None where there is no CUDA device.

    Never raises, and waits `patience_s` seconds at most: it is asked while something else is being reported.
    """
    if watched is None:
        return None
    if watched.why_no_driver is not None:
        return OthersFacts(reason=watched.why_no_driver)
    found = [OthersFacts(reason=f"the driver did not answer within {patience_s:g} s")]
    try:
        thread = threading.Thread(target=lambda: found.append(_read(watched)), name="effcli-nvml-others", daemon=True)
        thread.start()
    except RuntimeError as error:  # the system allows no more threads
        return OthersFacts(reason=first_line(error))
    thread.join(patience_s)
    return found[-1]


def _read(watched: CudaDevice) -> OthersFacts:
    try:
        with NvmlSession.open() as session:
            return _others(find_card(session, watched.card_names()).read(os.getpid()))
    except NvmlUnavailableError as error:
        return OthersFacts(reason=error.reason)
    except Exception as error:  # no fault of a reading may hide what is being reported
        return OthersFacts(reason=f"{type(error).__name__}: {first_line(error)}")


def _others(reading: CardReading) -> OthersFacts:
    """Return what is in use beside this process, and all that is in use where the two cannot be told apart."""
    used, process = reading.used, reading.process
    if used.num_bytes is None or process.num_bytes is None:
        return OthersFacts(device_bytes=used.num_bytes, reason=used.reason or process.reason)
    if used.num_bytes < process.num_bytes:
        return OthersFacts(device_bytes=used.num_bytes, reason=_CONTRADICTS)
    return OthersFacts(
        num_bytes=used.num_bytes - process.num_bytes,
        device_bytes=used.num_bytes,
        with_driver=reading.driver_reserved.num_bytes is None,
    )
