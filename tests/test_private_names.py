"""What is used of torch and accelerate though it is not public: where a version drops or changes it, this says what.

The other uses of such names are those of `effcli/trace`, whose own tests hold its numbers against measured ones.
"""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from effcli.engines.process_state import forget_states, one_process
from effcli.measure import torch_profiler

USES = [
    (torch.autograd, "_profiler_enabled", "no second profiler is started around an update"),
    (torch.Tensor, "_make_wrapper_subclass", "a saved tensor of a class that is not imported is described"),
    (AcceleratorState, "_reset_state", "a run with accelerate does not take the precision of an earlier one"),
    (GradientState, "_reset_state", "a run with accelerate does not take the accumulation of an earlier one"),
    (PartialState, "_shared_state", "trackers leave the device of a run alone"),
    (PartialState, "_reset_state", "trackers leave no device behind"),
]


@pytest.mark.parametrize(("holder", "name", "purpose"), USES, ids=[f"{use[0].__name__}.{use[1]}" for use in USES])
def test_a_private_name_is_there(holder: object, name: str, purpose: str) -> None:
    assert hasattr(holder, name), f"it is needed so that {purpose}"


def test_the_profilers_events_have_address_and_bytes_of_what_was_allocated_and_freed() -> None:
    assert not torch_profiler.is_running()
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        assert torch_profiler.is_running()
        tensor = torch.empty(4096)
        address = tensor.data_ptr()
        del tensor
    changes = [change for change in torch_profiler.changes(profile) if change[0] == address]
    assert changes == [(address, 16_384), (address, -16_384)]


def test_accelerates_state_is_one_process_meanwhile_and_forgotten_after() -> None:
    forget_states()
    with one_process():
        assert PartialState().num_processes == 1
    assert PartialState._shared_state == {}
    kept = PartialState(cpu=True)
    with one_process():
        pass
    assert PartialState._shared_state == vars(kept)
    forget_states()
    assert [state._shared_state for state in (PartialState, AcceleratorState, GradientState)] == [{}, {}, {}]
