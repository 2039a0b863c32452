"""The device and the precision that were asked for, refused early where they cannot be had."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from effcli.errors import DeviceError, UsageError
from effcli.hidden_devices import hide_other_devices, show_all_devices
from effcli.main_memory import available_to_process
from effcli.nvml.cuda_versions import needs_newer_driver
from effcli.nvml.hardware import has_nvidia_card
from effcli.nvml.session import NvmlSession, NvmlUnavailableError, cards
from effcli.nvml.visible import VISIBLE, read_listing
from effcli.ranks.launch import ALONE, Launch
from effcli.units import count

if TYPE_CHECKING:
    import torch


def weights_dtype(precision: str) -> str:
    """Return the dtype that a precision holds weights in, as torch calls it: autocast keeps them in float32."""
    return "bfloat16" if precision == "bf16-pure" else "float32"


def autocast_dtype(precision: str) -> str | None:
    """Return the dtype that autocast computes in, as torch calls it; None where a precision has no autocast."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(precision)


def resolve_device(name: str, launch: Launch = ALONE) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:i`; `auto` takes a CUDA device where there is one.

    Each of several processes on a machine takes the CUDA device of its local rank. For one alone, where CUDA has not
    started in this process, the other cards are hidden from it (`CUDA_VISIBLE_DEVICES`), because Trainer would spread a
    run over all that it sees; the chosen one is then `cuda:0`. No memory of the device is taken yet: `activate` does
    that.

    Raises:
        DeviceError: CUDA was asked for and is not there, or has no such index.
        UsageError: one CUDA device was asked for, and there are several processes.
    """
    import torch

    if name == "cpu":
        return torch.device("cpu")
    if launch.has_many:
        return _device_of_rank(name, launch)
    asked = int(name.partition(":")[2] or 0)
    index = asked if is_cpu_build() else hide_other_devices(asked, name)
    if not has_cuda():
        show_all_devices()
        if name == "auto":
            return torch.device("cpu")
        raise DeviceError(f"--device {name}: {_why_no_cuda()} --device cpu")
    if index >= torch.cuda.device_count():
        raise DeviceError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return torch.device("cuda", index)


def _device_of_rank(name: str, launch: Launch) -> torch.device:
    """Return the device of one of several processes.

    Raises:
        DeviceError, UsageError: see `resolve_device`.
    """
    import torch

    if ":" in name:
        raise UsageError(
            f"--device {name}: each of the {launch.world_size} processes takes a device of its own; use --device cuda, "
            "and CUDA_VISIBLE_DEVICES to choose which"
        )
    if not has_cuda():
        if name == "auto":
            return torch.device("cpu")
        raise DeviceError(f"--device {name}: {_why_no_cuda()} --device cpu")
    num_devices = torch.cuda.device_count()
    if launch.local_world_size > num_devices:
        raise DeviceError(
            f"{launch.local_world_size} processes were launched on this machine, which has "
            f"{count(num_devices, 'CUDA device')}; use --nproc-per-node {num_devices}, or --device cpu"
        )
    return torch.device("cuda", launch.local_rank)


def has_cuda() -> bool:
    """Tell whether torch has a CUDA device, also where it is told to ask NVML, which may be there without CUDA."""
    import torch

    if not torch.cuda.is_available() or os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1":
        return bool(torch.cuda.is_available())
    num_devices = getattr(torch._C, "_cuda_getDeviceCount", None)  # what torch asks otherwise (2.13)
    return num_devices is None or num_devices() > 0


def activate(device: torch.device) -> None:
    """Make a CUDA device the current one; from CUDA 12 on this creates its context, which takes memory."""
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def card_names(device: torch.device) -> tuple[str, ...]:
    """Return what the NVIDIA driver may call a CUDA device, the likeliest first; creates no context.

    A MIG instance that CUDA_VISIBLE_DEVICES lists goes before torch's identifier, which may be that of the whole card.
    Never the driver's index: CUDA counts otherwise.
    """
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    entries = read_listing(os.environ.get(VISIBLE, "")).entries
    listed = entries[index] if index < len(entries) else ""
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", None) or "")
    names = [f"{prefix}{uuid}" for prefix in ("GPU-", "MIG-") if uuid]
    if listed.startswith("MIG-"):
        names.insert(0, listed)
    elif listed.startswith("GPU-"):
        names.append(listed)
    return tuple(names)


def is_cpu_build() -> bool:
    """Return whether torch was built without code for GPUs."""
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def has_unseen_card() -> bool:
    """Return whether the machine has an NVIDIA card that nobody hid, where torch sees none."""
    listed = os.environ.get(VISIBLE)
    return has_nvidia_card() and (listed is None or bool(read_listing(listed).entries))


def _why_no_cuda() -> str:
    """Return why torch finds no CUDA device and what can be done, up to the last way: another `--device`."""
    import torch

    build = f"torch {torch.__version__}"
    if is_cpu_build():
        return f"{build} is a CPU-only build; install one for CUDA (https://pytorch.org/get-started/locally), or use"
    try:
        with NvmlSession.open() as session:
            num_cards, newest = sum(card.index is not None for card in cards(session)), session.cuda_version
    except NvmlUnavailableError as error:
        return f"{build} finds no CUDA device: {error.reason}; else use"
    needed = str(torch.version.cuda or "")
    if needed and needs_newer_driver(needed, newest):
        return (
            f"{build} is built for CUDA {needed}, and the NVIDIA driver serves CUDA up to {newest}; "
            f"update the driver, or install torch for CUDA {newest}, or use"
        )
    has = f"the NVIDIA driver has {count(num_cards, 'card')}"
    return f"{build} finds no CUDA device, though {has}; look at nvidia-smi, or use"


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that the device does not run, before anything is read.

    Raises:
        DeviceError: fp16 on a CPU, where every library accepts it and none scales; bf16 on a GPU without it.
    """
    import torch

    if precision == "fp16" and device.type == "cpu":
        raise DeviceError("--precision fp16 needs a CUDA device (it trains with a gradient scaler); use bf16 or fp32")
    if precision in ("bf16", "bf16-pure") and device.type == "cuda" and not _has_bfloat16(device):
        name = torch.cuda.get_device_name(device)
        raise DeviceError(f"--precision {precision}: {name} has no bfloat16; use --precision fp16 or fp32")


def _has_bfloat16(device: torch.device) -> bool:
    """Tell whether a CUDA device computes in bfloat16; asks for its properties alone, which creates no context."""
    import torch

    if torch.cuda.is_initialized() and device.index not in (None, torch.cuda.current_device()):
        return torch.version.hip is not None or int(torch.cuda.get_device_properties(device).major) >= 8
    return bool(torch.cuda.is_bf16_supported(False))  # of the current device, and without emulation


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that the device has free now; on a CPU those of main memory that this process can have.

    Asking a CUDA device creates its context.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return available_to_process()
