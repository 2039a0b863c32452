"""Rows stream: what is held at once does not grow with the size of the file."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest

from effcli.data.source import RawTables
from effcli.data.tokenise import texts
from tests.prepared import chosen

MEGABYTE = 10**6


def write(path: Path, *, num_rows: int, characters: int) -> Path:
    """Write rows of long words, the first of them different in every row, and return the file."""
    with path.open("w") as file:
        file.write({".csv": "text,label\n", ".json": "["}.get(path.suffix, ""))
        for index in range(num_rows):
            text = f"{index:09d}".ljust(50, "x") + " abcdefghij" * ((characters - 50) // 11)
            if path.suffix == ".csv":
                file.write(f"{text},{index % 2}\n")
            else:
                between = ",\n" if path.suffix == ".json" and index else "\n" if index else ""
                file.write(between + json.dumps({"text": text, "label": index % 2}))
        file.write("]" if path.suffix == ".json" else "\n")
    return path


def read(path: Path) -> tuple[RawTables, int]:
    """Return the tables of a file, and the characters of the training texts that were read one after the other."""
    raw, problem = chosen(path, eval_fraction=0.1)
    return raw, sum(map(len, texts(raw, problem)))


@pytest.mark.parametrize("form", ["csv", "jsonl", "json"])
def test_reading_a_file_holds_a_part_of_it(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / f"d.{form}", num_rows=4000, characters=4000)
    read(write(tmp_path / "few.csv", num_rows=2, characters=60))  # libraries are loaded
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        raw, num_characters = read(path)
        python_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(raw.train) == 3600
    assert num_characters > 14 * MEGABYTE
    # A thousand rows are written to the cache at once, which is 4 MB of text.
    assert python_bytes < 8 * MEGABYTE
    assert pa.total_allocated_bytes() - before < MEGABYTE


WHOLE_WAY = """
import sys, threading, time
from pathlib import Path
from effcli.data.columns import choose
from effcli.data.source import load_tables
from effcli.data.tokenise import texts, tokenise
from effcli.data.tokenizer import build_tokenizer
from effcli.spec import build_spec

def prepare(path):
    spec = build_spec({"data": {"train": path}})
    raw = load_tables(spec.data, seed=42)
    problem = choose(raw, spec, is_decoder=False, architectures=())
    tokenizer = build_tokenizer(texts(raw, problem), vocab_size=1000, model_type="distilbert", max_length=64)
    return tokenise(raw, problem, tokenizer, max_length=64)

def anonymous_kilobytes():
    # Pages of the mapped cache files count as resident, but the kernel takes them back when it needs them.
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))

def watch(peak):
    while True:
        peak[0] = max(peak[0], anonymous_kilobytes())
        time.sleep(0.01)

prepare(sys.argv[1])  # libraries are loaded
before = anonymous_kilobytes()
peak = [before]
threading.Thread(target=watch, args=(peak,), daemon=True).start()
started = time.process_time()
data = prepare(sys.argv[2])
print(data.train_rows, (peak[0] - before) * 1024, time.process_time() - started)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell of anonymous memory")
@pytest.mark.parametrize("form", ["csv", "jsonl", "json"])
def test_a_hundred_thousand_rows_are_prepared_in_a_part_of_their_size(tmp_path: Path, form: str) -> None:
    few = write(tmp_path / "few.csv", num_rows=2000, characters=1000)
    many = write(tmp_path / f"many.{form}", num_rows=100_000, characters=1000)
    arguments = [sys.executable, "-c", WHOLE_WAY, str(few), str(many)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    num_rows, grown_bytes, _ = done.stdout.split()
    assert int(num_rows) == 100_000
    assert many.stat().st_size > 98 * MEGABYTE
    assert int(grown_bytes) < 40 * MEGABYTE
