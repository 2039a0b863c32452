"""Saved optimizer states of every kind, read without running what they hold. Importing a name of it needs torch."""

from __future__ import annotations

from effcli.saved.optimizer import SavedOptimizer
from effcli.saved.read import read_saved
from effcli.saved.values import TensorValues, values_of

__all__ = ["SavedOptimizer", "TensorValues", "read_saved", "values_of"]
