"""From a row of public measurements to a case that can be traced, or to the reason why it is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Case = dict[str, Any]

_HERE = Path(__file__).parent
_CATALOGUE = _HERE.parents[1] / "effcli" / "catalogue" / "models.json"

VERSIONS = {
    "bert-base-uncased": "4.42.4",
    "gpt2": "4.42.4",
    "gpt2-large": "4.42.4",
    "pythia": "4.42.4",
    "opt-350m": "4.46.3",
    "distilbert": "4.46.3",
    "biogpt": "4.46.3",
    "albert": "4.46.3",
    "roberta-base": "4.42.4",
    "vit-base-patch16-224": "4.42.4",
    "deberta-v3-base": "4.42.4",
}
"""transformers of the day of a measurement, where its source doesn't say it."""

CAPABILITIES = (
    (r"A100|A800", (8, 0)),
    (r"A10|A40|A6000|RTX 30", (8, 6)),
    (r"L4|L40|RTX 40", (8, 9)),
    (r"H100|H200|H800|GH200", (9, 0)),
    (r"V100", (7, 0)),
    (r"T4|RTX 20|GTX 16", (7, 5)),
    (r"P100", (6, 0)),
    (r"AMD", (9, 4)),
)
"""Of what a card is called, the first that is found."""

HEADS = {
    "vocabulary head": "MaskedLM",
    "fill-mask": "MaskedLM",
    "causal LM": "CausalLM",
    "text-generation": "CausalLM",
    "text-classification": "SequenceClassification",
    "sequence-classification": "SequenceClassification",
    "multiple-choice": "MultipleChoice",
    "token-classification": "TokenClassification",
    "image-classification": "ImageClassification",
}

_OLD = re.compile(r"not stated \(.*(4\.15|20(19|20|21|22)).*\)|^[23]\.")


def left_out(row: Row) -> str | None:
    """Return why a row is no step of a whole model that can be imitated; None if it is one."""
    checks = (
        (row["value_bytes"] is None, "did not fit the card"),
        (row["scope"] == "component", "a component: checked by tests of single causes"),
        (row["scope"] not in ("train_step", "fwd_bwd"), f"not a step: {row['scope']}"),
        ("timm" in row["transformers"], "compiled kernels, and no model of transformers"),
        (_OLD.search(row["transformers"]) is not None, "older than the versions that the tracer runs on"),
        ("nf4" in row["config_facts"], "a 4-bit base, whose kernels need data; its settings were not verified"),
    )
    return next((reason for applies, reason in checks if applies), None)


def sorted_out(rows: Sequence[Row]) -> tuple[dict[str, Case], dict[str, str]]:
    """Return the cases that can be traced, and why the other rows are left out, both by id."""
    cases, reasons = {}, {}
    for row in rows:
        reason = left_out(row)
        try:
            cases |= {} if reason else {row["id"]: case_of(row)}
        except (KeyError, StopIteration):
            reason = "a model, head or card that is in no table here"
        reasons |= {row["id"]: reason} if reason else {}
    return cases, reasons


def case_of(row: Row) -> Case:
    """Return the case of a row that is not left out.

    Raises:
        KeyError, StopIteration: model, head or card is in no table here.
    """
    trainer = row["scope"] == "train_step"
    head = next(found for words, found in HEADS.items() if row["head"].startswith(words))
    return {
        "id": row["id"],
        "version": version_of(row),
        "config": config_of(row["model"]),
        "head": head,
        "attn": _attention(row),
        "weights": _weights(row["precision"]),
        "autocast": "bf16" if "bf16 autocast" in row["precision"] else None,
        "capability": next(found for pattern, found in CAPABILITIES if re.search(pattern, row["gpu"])),
        "rocm": "AMD" in row["gpu"],
        "loop": "trainer" if trainer else "script",
        "optimizer": "adamw" if trainer else None,
        "checkpointing": row["grad_checkpointing"],
        "lora": _adapters(row["config_facts"]),
        "inputs": _inputs(head, trainer),
        "batch": row["batch"],
        "length": int(re.match(r"\d+", str(row["seq"]))[0]),  # type: ignore[index]
        "quantity": _quantity(row["quantity"]),
    }


def version_of(row: Row) -> str:
    """Return the version of transformers that a row is evaluated with."""
    stated: str = row["transformers"]
    if re.fullmatch(r"[\d.]+", stated):
        return stated
    return next(version for name, version in VERSIONS.items() if name in row["model"])


def config_of(model: str) -> dict[str, Any]:
    """Return a model's public configuration, from the project's catalogue or from the table beside this file."""
    name = re.sub(r" .*", "", model)
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in (_CATALOGUE, _HERE / "public_models.json")]
    known = {key: value.get("config", value) for table in tables for key, value in table.items()}
    known |= {key.rpartition("/")[2]: config for key, config in known.items()}
    config = known.get(name) or known[name.rpartition("/")[2]]
    return {key: value for key, value in config.items() if key not in ("torch_dtype", "architectures")}


def _attention(row: Row) -> str:
    stated: str = row["attn"]
    if stated.startswith("library default"):
        # Of these only BERT and ViT had more than one implementation then, and both took sdpa.
        return "sdpa" if row["model"].rpartition("/")[2].startswith(("bert", "vit")) else "eager"
    return stated.split()[0]


def _quantity(stated: str) -> str:
    if not stated.startswith("torch"):
        return "device"
    return "reserved" if "reserved" in stated else "allocated"


def _weights(precision: str) -> str:
    if precision.startswith("fp16 weights"):
        return "float16"
    return "bfloat16" if precision.startswith("bfloat16 weights") else "float32"


def _adapters(facts: str) -> dict[str, Any] | None:
    if "LoRA" not in facts:
        return None
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return {"r": 16, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": modules}


def _inputs(head: str, trainer: bool) -> str:
    if not trainer:
        return "ids"
    return {"ImageClassification": "images", "SequenceClassification": "classes", "MultipleChoice": "choices"}.get(
        head, "tokens"
    )
