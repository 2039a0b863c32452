"""Why the NVIDIA driver gives no answer: one line each, which names what can be done where something can."""

from __future__ import annotations

from effcli.errors import first_line
from effcli.nvml.names import readable
from effcli.units import cut


class NvmlUnavailableError(Exception):
    """The driver, or a card of it, can't be asked. `reason` says why in one line; it is no reason to end a run."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DriverLostError(NvmlUnavailableError):
    """The driver, or the card, was lost while it was read: later readings would do no better."""


NO_PACKAGE = "the package nvidia-ml-py is not installed; pip install nvidia-ml-py"
OLD_PACKAGE = "the module pynvml is too old for this driver, or not nvidia-ml-py's; pip install --upgrade nvidia-ml-py"
NOT_REPORTED = "the driver doesn't report it (so it is in WSL, and on Windows with WDDM)"
OLD_DRIVER = "the NVIDIA driver is too old for the question"

FUNCTION_NOT_FOUND = 13
NOT_FOUND = 6
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
INSUFFICIENT_SIZE = 7

_LOST = frozenset({1, 9, 15, 16, 18, 28})
"""Codes after which no later call does better: driver closed, unloaded or replaced; card lost, to be reset or gone."""

_REASONS = {
    1: "the NVIDIA driver was closed in this process",
    INVALID_ARGUMENT: "the NVIDIA driver does not know this device any more (a MIG instance may have been removed)",
    NOT_SUPPORTED: "this card or driver does not answer the question (not supported, as on Windows with WDDM or in a "
    "virtual machine)",
    NO_PERMISSION: "no permission to ask the NVIDIA driver about this device (in a container, "
    "NVIDIA_DRIVER_CAPABILITIES needs 'utility')",
    NOT_FOUND: "the NVIDIA driver does not know this device",
    INSUFFICIENT_SIZE: "the NVIDIA driver's list grew while it was read",
    9: "the NVIDIA driver is not loaded (nvidia-smi says more)",
    10: "the NVIDIA driver did not answer in time",
    11: "the NVIDIA driver has a problem with interrupts of the card (dmesg says more)",
    12: "the NVIDIA driver's library (libnvidia-ml) was not found; it comes with the driver",
    FUNCTION_NOT_FOUND: OLD_DRIVER,
    15: "the card was lost: it fell off the bus (dmesg says more; a reboot may help)",
    16: "the card needs a reset before it can be used again (nvidia-smi --gpu-reset, or a reboot)",
    17: "the operating system does not let the NVIDIA driver be asked (a container's limits, or SELinux)",
    18: "the NVIDIA driver and its library have different versions, as after an update; a reboot helps",
    20: "the NVIDIA driver had too little memory to answer",
    23: "the NVIDIA driver had too few resources to answer",
    25: OLD_DRIVER,
    28: "the NVIDIA driver finds no card",
    999: "the NVIDIA driver met an unknown error; a container that has lost its devices needs to be started again",
}
"""Reason for each code of NVML (nvmlReturn_t in nvml.h); codes are part of its binary interface and never change."""


def code_of(error: Exception) -> int | None:
    """Return NVML's code of what `pynvml` raised, None for anything else.

    A list of processes that the driver lacks in the wanted version raises `NVMLLibraryMismatchError`, without a code.
    """
    if type(error).__name__ == "NVMLLibraryMismatchError":
        return FUNCTION_NOT_FOUND
    code = getattr(error, "value", None)
    return code if isinstance(code, int) else None


def explain(error: Exception) -> str:
    """Return the reason in one line: in our words, or the error's own where we have none."""
    if isinstance(error, NvmlUnavailableError):
        return error.reason
    if isinstance(error, (AttributeError, TypeError)):
        return OLD_PACKAGE
    code = code_of(error)
    return _REASONS.get(code or 0) or f"the NVIDIA driver could not be asked: {_told(error)}"


def _told(error: Exception) -> str:
    """Return an error's own words and code; `pynvml` asks the driver for the words, which may fail in turn."""
    try:
        text = cut(readable(first_line(error)), 120)
    except Exception:
        text = type(error).__name__
    code = code_of(error)
    return text if code is None else f"{text} (code {code})"


def unless_lost(error: Exception) -> None:
    """Return where another question may still be answered.

    Raises:
        DriverLostError: the driver or the card is gone.
    """
    if isinstance(error, DriverLostError):
        raise error
    if code_of(error) in _LOST:
        raise DriverLostError(explain(error)) from error
