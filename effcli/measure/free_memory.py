"""Memory that nothing refers to any more, given back."""

from __future__ import annotations

import gc


def free_memory() -> None:
    """Give back what nothing refers to any more, and what torch's allocator keeps for later."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
