"""The device and the precision that were asked for, refused early where they cannot be had."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from effcli.errors import DeviceError, UsageError

if TYPE_CHECKING:
    import torch


def weights_dtype(precision: str) -> str:
    """Return the dtype that a precision holds weights in, as torch calls it: autocast keeps them in float32."""
    return "bfloat16" if precision == "bf16-pure" else "float32"


def autocast_dtype(precision: str) -> str | None:
    """Return the dtype that autocast computes in, as torch calls it; None where a precision has no autocast."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(precision)


def refuse_many_processes() -> None:
    """Refuse a launch with several processes, which would train unsynchronised copies.

    Raises:
        UsageError: `WORLD_SIZE` is above 1.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size not in ("", "1"):
        raise UsageError(
            f"WORLD_SIZE is {world_size}, but training with more than one process is not supported yet; "
            "start effcli directly, without torchrun or accelerate launch"
        )


def resolve_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:i`; `auto` takes a CUDA device where there is one.

    Where CUDA has not been initialised in this process, the other cards are hidden from it (`CUDA_VISIBLE_DEVICES`),
    because Trainer would spread a run over all that it sees; the chosen one is then `cuda:0`.

    Raises:
        DeviceError: CUDA was asked for and is not there, or has no such index.
    """
    import torch

    index = int(name.partition(":")[2] or 0)
    if name != "cpu" and not torch.cuda.is_initialized():
        index = _hide_other_devices(index)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = "is a CPU-only build" if torch.version.cuda is None else "finds no such CUDA device"
        raise DeviceError(f"--device {name}: torch {torch.__version__} {reason}; use --device cpu")
    if index >= torch.cuda.device_count():
        raise DeviceError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _hide_other_devices(index: int) -> int:
    """Leave the device with this index visible, none where the index is too high; return its index from then on."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
    else:
        visible = [item.strip() for item in listed.split(",") if item.strip()]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[index] if index < len(visible) else ""
    return 0


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that the device does not run, before anything is read.

    Raises:
        DeviceError: fp16 on a CPU, where every library accepts it and none scales; bf16 on a GPU without it.
    """
    import torch

    if precision == "fp16" and device.type == "cpu":
        raise DeviceError("--precision fp16 needs a CUDA device (it trains with a gradient scaler); use bf16 or fp32")
    if precision in ("bf16", "bf16-pure") and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        name = torch.cuda.get_device_name(device)
        raise DeviceError(f"--precision {precision}: {name} has no bfloat16; use --precision fp16 or fp32")


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that the device has free now; on a CPU see `available_to_process`."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return available_to_process()


def available_to_process() -> int | None:
    """Return the bytes of main memory that the system can give this process now; None if unknown.

    In a Linux container the control group may allow less than the machine has, and `ulimit -v` less than that.
    """
    amounts = (_available_to_system(), _left_in_group(), _left_of_address_space())
    return min((amount for amount in amounts if amount is not None), default=None)


def _available_to_system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_group() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _left_of_address_space() -> int | None:
    if sys.platform != "linux":
        return None
    import resource  # not on Windows

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return None if limit == resource.RLIM_INFINITY else max(0, limit - used)
