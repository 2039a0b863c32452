"""What the NVIDIA driver says about a device's memory, or one line saying why it says nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from effcli.measure.device_record import Amount, NvmlFacts

if TYPE_CHECKING:
    import torch

_REASONS = {
    "LibraryNotFound": "the NVIDIA driver's library (libnvidia-ml) was not found",
    "DriverNotLoaded": "the NVIDIA driver is not loaded",
    "LibRmVersionMismatch": "the NVIDIA driver and its library have different versions; a reboot usually helps",
    "NoPermission": "no permission to ask the NVIDIA driver about this device",
    "NotSupported": "this device does not support the question",
    "NotFound": "the NVIDIA driver does not know this device",
    "FunctionNotFound": "the NVIDIA driver is too old for the question",
}
"""Reason for each error class of `pynvml`, named after `NVMLError_`."""

_NOT_REPORTED = 2**64 - 1
"""NVML's "value not available", which `pynvml` turns into None for some calls only."""


def read_nvml(device: torch.device | None, *, nvml: Any = None, uuid: str | None = None) -> NvmlFacts:
    """Return the bytes that the driver counts for the device as a whole and for this process.

    Never raises, since a probe must not end a run: whatever is missing is None and `reason` says why in one line.
    `nvml` stands for the module `pynvml` and `uuid` for the device's identifier; both are found when not given.
    Devices are matched by that identifier, since torch's index follows `CUDA_VISIBLE_DEVICES` and the driver's
    does not.
    """
    if device is None or device.type != "cuda":
        return NvmlFacts(reason=f"the run was on {device.type if device else 'cpu'}, not on an NVIDIA GPU")
    try:
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return NvmlFacts(reason="the package nvidia-ml-py is not installed")
    except Exception as error:
        return NvmlFacts(reason=_explain(error))
    try:
        handle = _handle(nvml, uuid or _uuid(device))
        device_used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        process_used, reason = _process_bytes(nvml, handle)
        return NvmlFacts(
            device=Amount(peak_bytes=device_used, last_bytes=device_used),
            process=Amount(peak_bytes=process_used, last_bytes=process_used, reason=reason),
        )
    except Exception as error:
        return NvmlFacts(reason=_explain(error))
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


def _uuid(device: torch.device) -> str:
    """Return the device's identifier as torch knows it, without the driver's prefix."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def _handle(nvml: Any, uuid: str) -> Any:
    """Return the driver's handle; a part of a card (MIG) has the other prefix."""
    if uuid.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as error:
        if _name(error) not in ("NotFound", "InvalidArgument"):
            raise
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _process_bytes(nvml: Any, handle: Any) -> tuple[int | None, str | None]:
    """Return the bytes of this process, or None and the reason; 0 never stands for unknown."""
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError as error:
        return None, f"per process: {_explain(error)}"
    used = {process.pid: process.usedGpuMemory for process in processes}
    if os.getpid() not in used:
        return None, "per process: the driver does not list this process (in a container it sees other process ids)"
    own = used[os.getpid()]
    if own is None or own == _NOT_REPORTED:
        return None, "per process: n/a (the driver doesn't report it)"
    return int(own), None


def _name(error: Exception) -> str:
    return type(error).__name__.removeprefix("NVMLError_")


def _explain(error: Exception) -> str:
    """Return the reason in our words, or the error's own first line where we have none."""
    return _REASONS.get(_name(error)) or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
