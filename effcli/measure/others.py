"""What other processes hold of a CUDA device, asked of the NVIDIA driver once. No torch by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effcli.measure.card_readings import PATIENCE_S, read_once
from effcli.measure.device_record import OthersFacts
from effcli.measure.device_samples import MORE_THAN_USED, TOO_LITTLE
from effcli.nvml.answers import CardReading

if TYPE_CHECKING:
    from effcli.measure.cuda_allocator import Counters
    from effcli.measure.device_monitor import CudaDevice


def held_by_others(watched: CudaDevice | None, *, patience_s: float = PATIENCE_S) -> OthersFacts | None:
    """Return what the driver says now of other processes; None where there is no CUDA device.

    Raises nothing of the driver's, and waits `patience_s` seconds at most: it is asked while a failure is reported.
    """
    if watched is None:
        return None
    if watched.why_no_driver is not None:
        return OthersFacts(reason=watched.why_no_driver)
    reserved_bytes = _reserved_bytes(watched.counters)
    return read_once(
        watched.card_names,
        lambda reading: _others(reading, reserved_bytes),
        lambda why: OthersFacts(reason=why),
        patience_s=patience_s,
        name="effcli-nvml-others",
    )


def _reserved_bytes(counters: Counters) -> int:
    """Return what torch holds of the device at least: 0 where an allocator that is plugged in counts nothing."""
    try:
        return counters.read().reserved_bytes
    except RuntimeError:
        return 0


def _others(reading: CardReading, reserved_bytes: int) -> OthersFacts:
    """Return what is in use beside this process, and all that is in use where the two cannot be told apart."""
    used, process = reading.used, reading.process
    if used.num_bytes is None or process.num_bytes is None:
        return OthersFacts(device_bytes=used.num_bytes, reason=used.reason or process.reason)
    if process.num_bytes < reserved_bytes:
        return OthersFacts(device_bytes=used.num_bytes, reason=TOO_LITTLE)
    if used.num_bytes < process.num_bytes:
        return OthersFacts(device_bytes=used.num_bytes, reason=MORE_THAN_USED)
    return OthersFacts(
        num_bytes=used.num_bytes - process.num_bytes,
        device_bytes=used.num_bytes,
        with_driver=reading.driver_reserved.num_bytes is None,
    )
