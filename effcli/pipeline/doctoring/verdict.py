"""What a doctor's report means for the exit code."""

from __future__ import annotations

from effcli.errors import DeviceError
from effcli.measure.doctor_record import DoctorRecord


def check_requested_device(record: DoctorRecord) -> None:
    """Raise where the device that was asked for cannot work; other problems are what the report is for.

    Raises:
        DeviceError: no training step succeeded on it.
    """
    if record.device_works is False:
        found = next((check.text for check in record.problems if check.name == "device"), "it does not work")
        raise DeviceError(f"--device {found}")
