"""torch's Muon for hidden matrices, with AdamW for the rest. Build and state law side by side; no torch at import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from effcli.optim import flat
from effcli.optim.building import named, with_betas
from effcli.optim.entry import Groups, Hyper, OptimizerEntry, never_on_shards
from effcli.optim.groups import partition, split_groups
from effcli.optim.laws import ADAM_DEFAULTS, TORCH_STEP, full
from effcli.optim.ranges import AT_LEAST_0, DECAY, Range, one_of
from effcli.units import ParamInfo, StateTensor

if TYPE_CHECKING:
    import torch


def _muon_arguments(hyper: Hyper) -> dict[str, Any]:
    return {"eps": hyper["ns_eps"], **named("lr", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")(hyper)}


def _build_muon(groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
    """Return one optimizer over groups that are each Muon's or AdamW's; hidden matrices are Muon's."""
    from effcli.optim.families.muon_with_adamw import MuonWithAdamW

    parts: list[dict[str, Any]] = []
    for group in split_groups(groups, hyper):
        own = {**hyper, **group.pop("overrides", {})}
        matrices, rest = partition(group, _is_muons)
        parts.append({**matrices, **_muon_arguments(own), "use_muon": True})
        parts.append({**rest, **with_betas("eps")(own), "use_muon": False})
    return MuonWithAdamW([part for part in parts if part["params"]], lr=hyper["lr"])


def _is_muons(shape: Sequence[int], hidden: bool) -> bool:
    return hidden and len(shape) == 2


def _muon_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return one buffer for a hidden matrix, `step` and two moments for anything else, in the parameter's own dtype.

    Source: `Muon._init_group` in torch/optim/_muon.py, 2.13: `zeros_like(p.grad)`, no `step`. The rest is AdamW's.
    """
    if _is_muons(param.shape, param.hidden):
        return (full("momentum_buffer", param),)
    return (TORCH_STEP, full("exp_avg", param), full("exp_avg_sq", param))


_ADAMWS_NOTE = "muon: an override of beta1, beta2 or eps has no effect on a hidden matrix, which AdamW does not train."

ENTRIES = (
    OptimizerEntry(
        name="muon",
        summary="Muon of torch for hidden matrices, one buffer each; AdamW for embeddings, head, norms and biases.",
        law="A hidden matrix has one buffer of its shape and dtype and no step. Everything else, tensors of three or "
        "more dimensions (convolutions, fused experts) too, has two moments of its shape and dtype and a 4-byte step.",
        formula="w*n if hidden and dims == 2 else 2*w*n + 4",
        source="Jordan et al., 2024, kellerjordan.github.io/posts/muon; torch/optim/_muon.py and adam.py, torch 2.13",
        # One rate serves both halves: match_rms_adamw gives an orthogonalised update the RMS of AdamW's, 0.2 * lr or
        # so (Liu et al., arXiv 2502.16982, section 2.2), where upstream's "original" wants a rate of its own, 0.02 say.
        defaults={
            **ADAM_DEFAULTS,
            "momentum": 0.95,
            "nesterov": True,
            "ns_steps": 5,
            "ns_eps": 1e-7,
            "adjust_lr_fn": "match_rms_adamw",
        },
        hyper_help={
            "lr": "rate of AdamW, and of Muon by adjust_lr_fn",
            "momentum": "of Muon's buffer",
            "ns_steps": "Newton-Schulz iterations that orthogonalise an update",
            "ns_eps": "smallest norm by which Muon divides an update",
            "adjust_lr_fn": "match_rms_adamw gives Muon's update the size of AdamW's; original keeps Muon's own scale",
            "beta1": "AdamW's",
            "beta2": "AdamW's",
            "eps": "AdamW's",
        },
        ranges={
            "momentum": DECAY,
            "ns_steps": Range(lambda x: 1 <= x < 100, "between 1 and 99"),
            "ns_eps": AT_LEAST_0,
            "adjust_lr_fn": one_of("match_rms_adamw", "original"),
        },
        override_notes=dict.fromkeys(("beta1", "beta2", "eps"), _ADAMWS_NOTE),
        build=_build_muon,
        state_layout=_muon_layout,
        # Tried in 2 and 3 processes: an orthogonalised gradient of full rank is 2 % off, one of rank 2 up to 60 %, and
        # the step of a matrix with fewer rows than processes fails.
        shard_fault=never_on_shards(
            "on shards torch 2.13 adds up products of whole matrices in bf16, which changes updates by percents"
        ),
        flat_fault=flat.FOR_MATRICES,
        cpu_note="muon: it multiplies matrices in bf16, which a CPU without bf16 instructions does up to a hundred "
        "times slower than in float32; a large model needs a GPU",
    ),
)
