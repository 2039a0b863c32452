"""Print how long `effcli --help` takes: median of five runs, beside an empty Python and `import torch`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 5


def median_s(*arguments: str) -> float:
    """Return the median wall time of a Python command in seconds, after one run that fills the file cache."""
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


if __name__ == "__main__":
    empty_s = median_s("-c", "pass")
    help_s = median_s("-m", "effcli", "--help")
    torch_s = median_s("-c", "import torch")
    print(f"effcli --help   {help_s:.3f} s")
    print(f"python -c pass  {empty_s:.3f} s  ({help_s / empty_s:.1f} times as long with effcli --help)")
    print(f"import torch    {torch_s:.3f} s  ({help_s / torch_s:.2f} of that with effcli --help)")
