"""Which settings of torch's CUDA allocator make it reserve otherwise than a plan assumes."""

from __future__ import annotations

import pytest

from effcli.measure.allocator_settings import allocator_settings
from effcli.measure.cuda_allocator import AllocatorPhases, TorchCounters


@pytest.mark.parametrize(
    "value", ["", "expandable_segments:False", "backend:native, pinned_use_cuda_host_register:True"]
)
def test_settings_that_reserve_as_planned_are_none(value: str) -> None:
    assert allocator_settings({"PYTORCH_ALLOC_CONF": value, "PYTORCH_CUDA_ALLOC_CONF": value}) is None
    assert allocator_settings({}) is None


@pytest.mark.parametrize(
    "value",
    [
        "expandable_segments:True",
        "backend:cudaMallocAsync",
        "max_split_size_mb:512",
        "pinned_use_background_threads:True,garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,>:8]",
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_others_are_told_as_they_were_given(name: str, value: str) -> None:
    assert allocator_settings({name: value}) == f"{name}={value}"


def test_an_allocator_that_counts_nothing_has_no_counts_rather_than_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert allocator_settings() == "PYTORCH_NO_CUDA_MEMORY_CACHING=1"
    counters = TorchCounters(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch counts no tensors on CUDA"):
        counters.read()
    with pytest.raises(RuntimeError, match="PYTORCH_NO_CUDA_MEMORY_CACHING"):
        AllocatorPhases(counters)
