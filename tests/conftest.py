"""Set-up of the whole test suite: no network, no caches of the user, the same output on every machine."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

CACHE = tempfile.mkdtemp(prefix="effcli-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

# These are read when the libraries are imported, so they are set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HOME"] = CACHE
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["NO_COLOR"] = "1"
for name in ("HF_TOKEN", "WORLD_SIZE", "RANK", "LOCAL_RANK", "FORCE_COLOR", "COLUMNS"):
    os.environ.pop(name, None)
