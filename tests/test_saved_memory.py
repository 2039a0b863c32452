"""A large file is inspected in little memory: its tensors are mapped, and their values pass through in parts."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

CODE = """
import json, sys
from pathlib import Path
from effcli.measure.optimizer_size import inspect_states
from effcli.saved import read_saved, values_of

def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

before = peak()
saved = read_saved(Path(sys.argv[1]))
size = inspect_states(saved.states.items())
read = peak()
shown = [(each.minimum, each.maximum, each.first[0]) for each in values_of(saved, "*")]
print(json.dumps([size.state_bytes, before, read, peak(), shown]))
"""
MIB = 1 << 20


class Sparse(io.FileIO):
    """A file that leaves a hole where zeros are written."""

    def write(self, data: Any) -> int:
        if len(data) > 4096 and not any(memoryview(data)[:4096]):
            self.seek(len(data), io.SEEK_CUR)
            return len(data)
        return super().write(data)


def large(path: Path, num_bytes: int) -> Path:
    """Write an optimizer's state of four equal tensors of zeros, as `torch.save` would, without filling the disk."""
    elements = num_bytes // 16
    state = {index: {"exp_avg": torch.empty(elements, device="meta")} for index in range(4)}
    small = io.BytesIO()
    torch.save(
        {"state": {i: {"exp_avg": torch.zeros(7)} for i in state}, "param_groups": [{"params": [*state]}]}, small
    )
    with zipfile.ZipFile(small) as source, Sparse(path, "w+") as file, zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                seven, many = b"K\x07", b"\x8a\x06" + elements.to_bytes(6, "little")
                assert content.count(seven) == 8  # the numbers of elements, of storages and of tensors
                content = content.replace(seven, many)
            with target.open(name, "w", force_zip64=True) as entry:
                for _ in range(4 * elements // MIB if "/data/" in name else 0):
                    entry.write(bytes(MIB))
                if "/data/" not in name:
                    entry.write(content)
    return path


@pytest.mark.parametrize("mib", [512, pytest.param(5 * 1024, marks=pytest.mark.slow)])
def test_a_large_file_is_inspected_in_little_memory(mib: int, tmp_path: Path) -> None:
    path = large(tmp_path / "optimizer.pt", mib * MIB)
    assert path.stat().st_blocks * 512 < 10 * MIB < mib * MIB < path.stat().st_size
    done = subprocess.run([sys.executable, "-c", CODE, str(path)], capture_output=True, text=True, check=True)
    state_bytes, before, read, after, shown = json.loads(done.stdout)
    assert state_bytes == mib * MIB
    assert shown == [[0.0, 0.0, 0.0]] * 4
    assert read - before < 16 * MIB
    assert after - before < 160 * MIB
    assert after < 1 << 30
