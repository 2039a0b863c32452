"""Shapes read from the meta device, kept so that the next estimate needs neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from effcli.errors import WriteError
from effcli.files import write_text
from effcli.shapes import ModelShapes, from_json, to_json

_FORMAT = 1
"""Raised when the meaning of the stored shapes changes."""


def cache_key(config: Mapping[str, Any], task: str | None, num_labels: int | None) -> str:
    """Return the name of the entry: configuration, task and labels as asked for, and the version of transformers."""
    values = [_FORMAT, version("transformers"), dict(config), task, num_labels]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def load_shapes(key: str) -> ModelShapes | None:
    """Return the shapes stored under a key; None where there are none, or they cannot be read."""
    try:
        return from_json(json.loads(_path(key).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_shapes(key: str, shapes: ModelShapes) -> None:
    """Keep shapes under a key; where nothing can be written, the next estimate takes the long way again."""
    with suppress(WriteError):
        write_text(_path(key), json.dumps(to_json(shapes), separators=(",", ":")))


def _path(key: str) -> Path:
    base = os.environ.get("EFFCLI_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "effcli" / "shapes" / f"{key}.json"
