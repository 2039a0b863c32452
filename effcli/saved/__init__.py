"""Saved optimizer states of every kind, read without running what they hold. Importing a name of it needs torch."""

from __future__ import annotations

from effcli.saved.optimizer import READ, SavedOptimizer
from effcli.saved.read import read_saved, split_key
from effcli.saved.values import values_of

__all__ = ["READ", "SavedOptimizer", "read_saved", "split_key", "values_of"]
