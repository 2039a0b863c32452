"""Whether the machine shows an NVIDIA card, with or without a driver for it."""

from __future__ import annotations

from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
CONTROL_DEVICE = Path("/dev/nvidiactl")

_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""Vendor, and beginning of the class, as the PCI bus has them."""


def has_nvidia_card() -> bool:
    """Return whether the system shows a display adapter of NVIDIA, with or without a driver."""
    if CONTROL_DEVICE.exists():
        return True
    try:
        return any(
            (device / "vendor").read_text().strip() == _NVIDIA and (device / "class").read_text().startswith(_DISPLAY)
            for device in PCI_DEVICES.iterdir()
        )
    except OSError:
        return False
