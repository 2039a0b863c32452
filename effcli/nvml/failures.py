"""Why the NVIDIA driver gives no answer: one line each, which names what can be done where something can."""

from __future__ import annotations

from enum import IntEnum

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


class NvmlReturn(IntEnum):
    """NVML's codes that are told apart here, as `nvmlReturn_t` in nvml.h names them; they never change.

    `pynvml` has them too, as `NVML_ERROR_...`, but is imported only where a driver is asked, and may be missing.
    """

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    MEMORY = 20
    INSUFFICIENT_RESOURCES = 23
    ARGUMENT_VERSION_MISMATCH = 25
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


_LOST = frozenset(
    {
        NvmlReturn.UNINITIALIZED,
        NvmlReturn.DRIVER_NOT_LOADED,
        NvmlReturn.GPU_IS_LOST,
        NvmlReturn.RESET_REQUIRED,
        NvmlReturn.LIB_RM_VERSION_MISMATCH,
        NvmlReturn.GPU_NOT_FOUND,
    }
)
"""Codes after which no later call does better: driver closed, unloaded or replaced; card lost, to be reset or gone."""

_REASONS: dict[int, str] = {
    NvmlReturn.UNINITIALIZED: "the NVIDIA driver was closed in this process",
    NvmlReturn.INVALID_ARGUMENT: "the NVIDIA driver does not know this device any more (a MIG instance "
    "may have been removed)",
    NvmlReturn.NOT_SUPPORTED: "this card or driver does not answer the question (not supported, as on Windows with "
    "WDDM or in a virtual machine)",
    NvmlReturn.NO_PERMISSION: "no permission to ask the NVIDIA driver about this device (in a container, "
    "NVIDIA_DRIVER_CAPABILITIES needs 'utility')",
    NvmlReturn.NOT_FOUND: "the NVIDIA driver does not know this device",
    NvmlReturn.INSUFFICIENT_SIZE: "the NVIDIA driver's list grew while it was read",
    NvmlReturn.DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded (nvidia-smi says more)",
    NvmlReturn.TIMEOUT: "the NVIDIA driver did not answer in time",
    NvmlReturn.IRQ_ISSUE: "the NVIDIA driver has a problem with interrupts of the card (dmesg says more)",
    NvmlReturn.LIBRARY_NOT_FOUND: "the NVIDIA driver's library (libnvidia-ml) was not found; it comes with the driver",
    NvmlReturn.FUNCTION_NOT_FOUND: OLD_DRIVER,
    NvmlReturn.GPU_IS_LOST: "the card was lost: it fell off the bus (dmesg says more; a reboot may help)",
    NvmlReturn.RESET_REQUIRED: "the card needs a reset before it can be used again (nvidia-smi --gpu-reset, or "
    "a reboot)",
    NvmlReturn.OPERATING_SYSTEM: "the operating system does not let the NVIDIA driver be asked (a container's limits, "
    "or SELinux)",
    NvmlReturn.LIB_RM_VERSION_MISMATCH: "the NVIDIA driver and its library have different versions, as after an "
    "update; a reboot helps",
    NvmlReturn.MEMORY: "the NVIDIA driver had too little memory to answer",
    NvmlReturn.INSUFFICIENT_RESOURCES: "the NVIDIA driver had too few resources to answer",
    NvmlReturn.ARGUMENT_VERSION_MISMATCH: OLD_DRIVER,
    NvmlReturn.GPU_NOT_FOUND: "the NVIDIA driver finds no card",
    NvmlReturn.UNKNOWN: "the NVIDIA driver met an unknown error; a container that has lost its devices needs to be "
    "started again",
}


def code_of(error: Exception) -> int | None:
    """Return NVML's code of what `pynvml` raised, None for anything else.

    A list of processes that the driver lacks in the wanted version raises `NVMLLibraryMismatchError`, without a code.
    """
    if type(error).__name__ == "NVMLLibraryMismatchError":
        return NvmlReturn.FUNCTION_NOT_FOUND
    code = getattr(error, "value", None)
    return code if isinstance(code, int) else None


def explain(error: Exception) -> str:
    """Return the reason in one line: in our words, or the error's own where we have none."""
    if isinstance(error, NvmlUnavailableError):
        return error.reason
    if isinstance(error, (AttributeError, TypeError)):
        return OLD_PACKAGE
    code = code_of(error)
    known = None if code is None else _REASONS.get(code)
    return known or f"the NVIDIA driver could not be asked: {_told(error)}"


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
