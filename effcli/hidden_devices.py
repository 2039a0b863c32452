"""All CUDA devices but one, hidden from this process by CUDA_VISIBLE_DEVICES as long as CUDA has not started."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

from effcli.errors import DeviceError
from effcli.nvml.answers import CardIdentity
from effcli.nvml.names import readable
from effcli.nvml.session import NvmlSession, NvmlUnavailableError, cards
from effcli.nvml.visible import VISIBLE, check_listing, read_listing
from effcli.units import count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hiding:
    """What was done to CUDA_VISIBLE_DEVICES in this process: from `before` to `after`, for the device with an index."""

    before: str | None
    after: str
    index: int


_hiding: _Hiding | None = None
"""The last one: a later run in this process counts its devices as the first did."""


def hide_other_devices(asked: int, name: str) -> int:
    """Leave only the device with the index `asked` visible where that is still possible; return its index from then on.

    Raises:
        DeviceError: no such device is visible, or CUDA has started with another one.
    """
    global _hiding
    text, started = os.environ.get(VISIBLE), _cuda_has_started()
    if _hiding is not None and text == _hiding.after:
        if asked == _hiding.index or (started and name == "auto"):
            return 0
        if started:
            raise DeviceError(
                f"--device {name}: this process has used cuda:{_hiding.index} and can't change; start another process"
            )
        text = _hiding.before
    elif started:
        return asked
    entry = _counted_entry(asked, name) if text is None else _listed_entry(text, asked, name)
    if entry is None:
        return asked
    _hiding = _Hiding(before=text, after=entry, index=asked)
    os.environ[VISIBLE] = entry
    return 0


def environment_with_all_devices() -> dict[str, str]:
    """Return this process's variables for another one, which is to choose its device for itself."""
    variables = dict(os.environ)
    if _hiding is not None and variables.get(VISIBLE) == _hiding.after:
        del variables[VISIBLE]
        if _hiding.before is not None:
            variables[VISIBLE] = _hiding.before
    return variables


def show_all_devices() -> None:
    """Leave no trace of a choice that came to nothing."""
    global _hiding
    before = environment_with_all_devices().get(VISIBLE)
    if before is None:
        os.environ.pop(VISIBLE, None)
    else:
        os.environ[VISIBLE] = before
    _hiding = None


def _counted_entry(index: int, name: str) -> str:
    """Return the entry of a device by CUDA's own count, which CUDA_VISIBLE_DEVICES goes by as well.

    Raises:
        DeviceError: the driver has fewer cards.
    """
    known = _known_cards() if index else None  # the driver takes its time to open
    num_cards = sum(card.index is not None for card in known or ())
    if known and index >= num_cards:
        has = f"the NVIDIA driver has {count(num_cards, 'card')}, and CUDA counts them from 0"
        raise DeviceError(f"--device {name}: {has}; use a lower number, or --device cpu")
    return str(index)


def _listed_entry(text: str, index: int, name: str) -> str | None:
    """Return what CUDA_VISIBLE_DEVICES lists for an index; None where it hides all cards and `auto` was asked for.

    Raises:
        DeviceError: CUDA shows no device with this index.
    """
    listing = read_listing(text)
    known = None if text.startswith("MIG-") else _known_cards()  # an old driver does not list what CUDA may find
    if known and not any(card.unreadable for card in known):
        listing = check_listing(listing, known)
    num_shown = len(listing.entries)
    if index < num_shown:
        return listing.entries[index]
    if name == "auto":
        return None
    shown = count(num_shown, "device") if num_shown else "no device"
    why = f" ({listing.stopped})" if listing.stopped and text else ""
    lower = f"use --device cuda:{num_shown - 1}, " if num_shown else ""
    raise DeviceError(
        f"--device {name}: {VISIBLE}='{readable(text)}' shows {shown}{why}; {lower}unset it, "
        f"name others such as {VISIBLE}=0, or use --device cpu"
    )


def _known_cards() -> tuple[CardIdentity, ...] | None:
    """Return the driver's cards, None where it does not tell them."""
    try:
        with NvmlSession.open() as session:
            return cards(session)
    except NvmlUnavailableError:
        return None


def _cuda_has_started() -> bool:
    """Tell whether CUDA was started in this process, by torch or another library: it reads its variables then."""
    import torch

    if torch.cuda.is_initialized():
        return True
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return int(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0  # else CUDA_ERROR_NOT_INITIALIZED
    except (OSError, AttributeError):
        return False
