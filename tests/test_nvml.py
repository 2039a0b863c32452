"""What the driver says, through the real `pynvml` and the stand-in of the driver's library."""

from __future__ import annotations

import os

from effcli.nvml.session import NvmlSession, cards, find_card
from tests.nvml.standin import Driver

GIB = 2**30
UUID = "GPU-11111111-aaaa-bbbb-cccc-000000000000"
ONE_CARD = f"""
    card {UUID} NVIDIA H100 80GB HBM3
    memory {80 * GIB} {17 * GIB} {GIB // 2}
"""


def test_a_card_tells_its_memory_and_what_a_process_holds(driver: Driver) -> None:
    driver.play(ONE_CARD + f"process self {16 * GIB}\nprocess 1 {GIB}")
    with NvmlSession.open() as session:
        assert (session.driver_version, session.nvml_version, session.cuda_version) == (
            "570.86.15",
            "12.570.86.15",
            "12.8",
        )
        (identity,) = cards(session)
        assert (identity.uuid, identity.name, identity.index) == (UUID, "NVIDIA H100 80GB HBM3", 0)
        reading = find_card(session, [UUID]).read(os.getpid())
    amounts = [part.num_bytes for part in (reading.total, reading.used, reading.driver_reserved, reading.process)]
    assert amounts == [80 * GIB, 17 * GIB, GIB // 2, 16 * GIB]
    assert driver.calls() == [("init", 0), ("shutdown", 0)]
