"""Saved optimizer states of every kind, read without running what they hold. Importing a name of it needs torch."""

from __future__ import annotations

from effcli.saved.optimizer import SavedOptimizer
from effcli.saved.read import read_saved

__all__ = ["SavedOptimizer", "read_saved"]
