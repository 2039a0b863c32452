"""Predicts measured runs with the transformers of the interpreter that runs it: cases as JSON in, results out.

It imports of the project only what also runs beside older versions of transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from effcli.memory.caching_allocator import CachingAllocator
from effcli.memory.cards import CONTEXT_BYTES
from effcli.memory.compose import resident, updates
from effcli.memory.replay import Replay, replay
from effcli.memory.tape import StepTape
from effcli.optim import registry
from effcli.spec import OptimSpec
from effcli.trace.cuda import CudaKernels
from effcli.trace.micro import Batch
from effcli.trace.optimizer import trace_update
from effcli.trace.tracer import Tracer

Case = Mapping[str, Any]

FIRST_COUNTED = 1
"""Counters were reset after warm-up, or the first update is no higher: later ones are compared."""
NUM_UPDATES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutCublas(CudaKernels):
    """AMD's devices: torch 2.2 and 2.3 give their BLAS no workspace from the caching allocator."""

    def lasting_bytes(self) -> dict[str, tuple[int, ...]]:
        """Return nothing."""
        return {}


def predict(case: Case) -> Replay:
    """Return what the updates of a case do to the allocator."""
    kernels = (WithoutCublas if case["rocm"] else CudaKernels)(capability=tuple(case["capability"]))
    tracer = Tracer(lambda: build(case), kernels, whole=True)
    forward, loss = _trained if case["loop"] == "trainer" else _summed
    micro = tracer.micro(
        lambda: batch(case),
        forward=forward(case),
        loss=loss,
        precision=case["autocast"] or "fp32",
        keep_outputs=case["loop"] != "trainer",
    )
    before = resident(tracer.parameters, tracer.buffers)
    steps: list[StepTape | None] = [None] * NUM_UPDATES
    built = None
    if case["optimizer"]:
        asked = OptimSpec(name=case["optimizer"])
        entry = registry.find(case["optimizer"])
        tapes = trace_update(
            entry,
            tracer.parameters,
            registry.resolve_hyper(entry, asked),
            0.01,
            device="cuda",
            max_grad_norm=1.0,
            kernels=kernels,
        )
        built, steps = tapes.built, [tapes.first, *[tapes.later] * (NUM_UPDATES - 1)]
    program = list(updates(before, micro, steps, **({"built": built} if built else {})))
    return replay(program, CachingAllocator())


def build(case: Case) -> torch.nn.Module:
    """Return the model on the meta device, as the run trained it."""
    import transformers

    config = transformers.AutoConfig.for_model(**case["config"])
    head = getattr(transformers, f"AutoModelFor{case['head']}")
    with torch.device("meta"):
        model = head.from_config(config, attn_implementation=case["attn"], torch_dtype=getattr(torch, case["weights"]))
    if case["lora"]:
        from peft import LoraConfig, get_peft_model

        with torch.device("meta"):
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **case["lora"]))
    if case["checkpointing"]:
        model.gradient_checkpointing_enable()
        if case["lora"]:
            model.enable_input_require_grads()
    return model


def batch(case: Case) -> Batch:
    """Return the tensors that the run gave to the model."""
    rows, length = case["batch"], case["length"]
    ids = torch.zeros(rows, length, dtype=torch.int64)
    if case["inputs"] == "images":
        return {"pixel_values": torch.zeros(rows, 3, length, length), "labels": torch.zeros(rows, dtype=torch.int64)}
    if case["inputs"] == "ids":
        return {"input_ids": ids}
    mask = torch.ones(rows, length, dtype=torch.int64)
    if case["inputs"] == "choices":
        ids, mask = ids[:, None], mask[:, None]
    labels = torch.zeros(rows, dtype=torch.int64) if case["inputs"] in ("classes", "choices") else ids.clone()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _loop_of_a_script(case: Case) -> Any:
    return lambda model, inputs: model(**inputs)


def _loop_of_trainer(case: Case) -> Any:
    """Return the forward that gives the loss alone; accelerate makes outputs of autocast float32 before."""

    def forward(model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        outputs = model(**inputs)
        if case["autocast"]:
            with torch.autocast("cpu", enabled=False):
                outputs = {name: _as_float(value) for name, value in outputs.items()}
        loss: torch.Tensor = outputs["loss"]
        return loss

    return forward


def _as_float(value: Any) -> Any:
    """Return outputs as `accelerate.utils.operations.convert_to_fp32` leaves them, cached keys and values too."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, tuple | list):
        return [_as_float(item) for item in value]
    return value


_summed = _loop_of_a_script, lambda outputs, inputs: outputs.logits.sum()
_trained = _loop_of_trainer, lambda loss, inputs: loss


def result(case: Case) -> dict[str, Any]:
    """Return what is said about one case; `error` says why nothing could be predicted."""
    import transformers

    said: dict[str, Any] = {"id": case["id"], "transformers": transformers.__version__}
    try:
        played = predict(case)
    except Exception as error:  # an older or newer library may refuse a model that another takes
        return {**said, "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    counted = [moment for moment in played.moments if moment.update >= FIRST_COUNTED]
    peak = max(counted, key=lambda moment: moment.total_bytes)
    by_quantity = {
        "allocated": peak.total_bytes,
        "reserved": played.reserved_bytes,
        "device": played.reserved_bytes + CONTEXT_BYTES,
    }
    predicted = by_quantity[case["quantity"]]
    return {**said, "predicted_bytes": predicted, "phase": peak.phase}


def main() -> None:
    """Answer the cases on standard input, one line each."""
    cases = json.load(sys.stdin)
    if any(case["attn"] == "flash_attention_2" for case in cases):
        from tests.accuracy.flash_attention import stand_in

        stand_in()
    for case in cases:
        print(json.dumps(result(case)), flush=True)


if __name__ == "__main__":
    main()
