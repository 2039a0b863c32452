"""effcli: predict, train, and measure the memory of fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from effcli.measure.optimizer_size import compute_optimizer_size as compute_optimizer_size

__version__ = "0.1.0"
__all__ = ["__version__", "compute_optimizer_size"]


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is asked for."""
    if name == "compute_optimizer_size":
        from effcli.measure.optimizer_size import compute_optimizer_size

        return compute_optimizer_size
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
