"""Print time and memory of `effcli estimate` beside accelerate's own work on the same configurations.

Whole processes, imports included, in turns within one run. Its command asks the hub first; timed here is what it
does afterwards: the model on the meta device (`init_empty_weights`), and its size (`calculate_maximum_sizes`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from effcli.catalogue import lookup as catalogue

ROUNDS = 3
ACCELERATE = """
import json, sys
import accelerate.commands.estimate as estimate
from transformers import AutoConfig, AutoModel
config = json.load(open(sys.argv[1]))
with estimate.init_empty_weights():
    model = AutoModel.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
print(estimate.calculate_maximum_sizes(model)[0])
"""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one process took: wall seconds, and the largest resident set in bytes."""

    wall_s: float
    resident_bytes: int


def cost(*command: str, **environment: str) -> Cost:
    """Return what a Python command took."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Cost(wall_s=time.perf_counter() - start, resident_bytes=usage.ru_maxrss * 1024)


def show(label: str, costs: list[Cost], beside: list[Cost] | None = None) -> None:
    """Print the median, and its paired ratio to `beside`."""
    median_s = statistics.median(cost.wall_s for cost in costs)
    resident = max(cost.resident_bytes for cost in costs)
    ratio = ""
    if beside is not None:
        pairs = zip(costs, beside, strict=True)
        ratio = f"{statistics.median(a.wall_s / b.wall_s for a, b in pairs):6.2f} of accelerate's time"
    print(f"{label:44} {median_s:6.2f} s {resident / 2**20:7.0f} MiB {ratio}")


def main() -> None:
    """Run the comparison for a small and a huge model."""
    for name in ("distilbert-base-cased", "Llama-3.1-405B"):
        model = catalogue.find(name)
        assert model is not None
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.json"
            config.write_text(json.dumps(model.config))
            rounds: dict[str, list[Cost]] = {"accelerate": [], "catalogue": [], "all": [], "first": [], "second": []}
            for number in range(ROUNDS + 1):
                cache = str(Path(folder) / f"cache-{number}")
                one = {
                    "accelerate": cost("-c", ACCELERATE, str(config)),
                    "catalogue": cost("-m", "effcli", "estimate", name),
                    "all": cost("-m", "effcli", "estimate", name, "--optim", "all"),
                    "first": cost("-m", "effcli", "estimate", folder, EFFCLI_CACHE=cache),
                    "second": cost("-m", "effcli", "estimate", folder, EFFCLI_CACHE=cache),
                }
                if number:  # the first round fills the file cache
                    for key, taken in one.items():
                        rounds[key].append(taken)
        print(name)
        show("  accelerate, meta model and sizes", rounds["accelerate"])
        for key, label in (
            ("catalogue", "from the catalogue"),
            ("all", "from the catalogue, all optimizers"),
            ("first", "from a folder, first time"),
            ("second", "from a folder, second time"),
        ):
            show(f"  effcli estimate, {label}", rounds[key], rounds["accelerate"])


if __name__ == "__main__":
    main()
