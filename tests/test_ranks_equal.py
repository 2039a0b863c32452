"""Runs of several processes beside those of one with the same effective batch: the same losses, metrics and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from effcli import pipeline
from effcli.report.progress import QuietProgress
from tests.commands import TINY_DISTILBERT, TINY_GPT2, csv_file, model_folder, saved_weights, untimed
from tests.launched import LaunchServer

T5 = {
    "model_type": "t5", "vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
XLNET = {
    "model_type": "xlnet", "vocab_size": 1000, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "dropout": 0.0,
    "summary_last_dropout": 0.0,
}  # fmt: skip
CONFIGS = {"distilbert": TINY_DISTILBERT, "gpt2": TINY_GPT2, "t5": T5, "xlnet": XLNET}
SGD = {"name": "sgd-momentum", "lr": 0.01}
ADAMW = {"name": "adamw", "lr": 1e-3}
LM = {"task": "causal-lm"}
NORM_OF_SHARDS = 5e-6
"""Relative. Shards add the squares in another order, in float32, where the norm of one process is off by as much: that
of the language model with one row by 2.6e-6 of the norm in float64. Losses and weights agree to 1e-6."""
REST = 1e-7
"""Absolute, of a norm: of two classes with as many rows the gradients all but cancel, and what is left, 0.01 here, has
the rounding of summands that are ten times as large and more."""

Case = dict[str, Any]
"""`model`: type; `rows` and `eval_rows`; `batch` per process of two; other settings by section."""

FAST: dict[str, Case] = {
    # 22 rows in windows of 8: the last one has 6, in a micro-batch of 4 and one of 2; 9 rows are evaluated by 4.
    "classification": {},
    "causal-lm": {"model": "gpt2", "settings": {"model": LM}},
    "one row": {"model": "gpt2", "rows": 1, "eval_rows": 1, "settings": {"model": LM}},
    "fewer rows than a micro-batch": {"rows": 3, "eval_rows": 5, "batch": 2},
    "tokens in one process alone": {"model": "gpt2", "data": "one-word", "batch": 1, "settings": {"model": LM}},
    "scores": {"data": "scores", "rows": 5, "batch": 1},
    "shards": {"settings": {"loop": {"shard": "fsdp"}}},
    "shards and a process without rows": {
        "model": "gpt2",
        "rows": 1,
        "eval_rows": 1,
        "settings": {"model": LM, "loop": {"shard": "fsdp"}},
    },
}
SLOW: dict[str, Case] = {
    "adamw": {"settings": {"optim": ADAMW}, "weights": 0.01 * 1e-3 * 6},
    "adamw on shards": {"settings": {"optim": ADAMW, "loop": {"shard": "fsdp"}}, "weights": 0.01 * 1e-3 * 6},
    "adamw of a language model": {
        "model": "gpt2",
        "settings": {"model": LM, "optim": ADAMW},
        "weights": 0.01 * 1e-3 * 6,
    },
    "a language model's shards": {"model": "gpt2", "settings": {"model": LM, "loop": {"shard": "fsdp"}}},
    "seq2seq": {"model": "t5", "data": "pairs"},
    "shards of seq2seq": {"model": "t5", "data": "pairs", "settings": {"loop": {"shard": "fsdp"}}},
    "longest first": {"settings": {"loop": {"longest_first": True}}},
    "a data worker": {"settings": {"loop": {"num_workers": 1}}},
    "frozen": {"settings": {"model": {"freeze": ["*embeddings*"]}}},
    "frozen shards": {"settings": {"model": {"freeze": ["*embeddings*"]}, "loop": {"shard": "fsdp"}}},
    "adapters": {"settings": {"model": {"lora_r": 2, "lora_targets": ["all-linear"]}}},
    "shards of adapters": {
        "settings": {"model": {"lora_r": 2, "lora_targets": ["all-linear"]}, "loop": {"shard": "fsdp"}},
    },
    "checkpointing": {"settings": {"loop": {"gradient_checkpointing": True}}},
    "checkpointing on shards": {"settings": {"loop": {"gradient_checkpointing": True, "shard": "fsdp"}}},
    "no clipping": {"settings": {"loop": {"max_grad_norm": 0}}},
    "percentile": {"settings": {"loop": {"percentile_clipping": 50}}},
    "percentile on shards": {"settings": {"loop": {"percentile_clipping": 50, "shard": "fsdp"}}},
    "a parameter without gradient": {"model": "xlnet"},
    "bf16": {"settings": {"loop": {"precision": "bf16"}}, "losses": 1e-2, "weights": 1e-3},
    "every batch of one row": {"batch": 1, "rows": 7},
}


def rows_file(path: Path, kind: str, count: int) -> Path:
    if kind == "sentences":
        return csv_file(path, count)
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    texts = [" ".join(words[(index + step) % 7] for step in range(1 + index % 5)) for index in range(count)]
    if kind == "one-word":  # nothing is to be predicted in three of four rows
        made = [f"{text if index % 4 == 0 else 'one'},{index}" for index, text in enumerate(texts)]
        return _written(path, ["sentence,number", *made])
    if kind == "scores":
        return _written(path, ["sentence,label", *(f"{text},{index / 3:.3f}" for index, text in enumerate(texts))])
    return _written(
        path, ["document,summary", *(f"{text},{text[: 3 + index % 9]}" for index, text in enumerate(texts))]
    )


def _written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(folder: Path, name: str, case: Case, *, ranks: int, processes: int) -> dict[str, Any]:
    """Return the settings of a case for so many processes, whose window is that of `ranks` with the case's batch."""
    kind, model = case.get("data", "sentences"), case.get("model", "distilbert")
    train = rows_file(folder / f"{kind}-{case.get('rows', 22)}.csv", kind, case.get("rows", 22))
    evaluation = rows_file(folder / f"{kind}-{case.get('eval_rows', 9)}.csv", kind, case.get("eval_rows", 9))
    more = case.get("settings", {})
    text = {"text_columns": ["sentence"]} if more.get("model") == LM else {}
    batch = case.get("batch", 2) * ranks // processes
    loop = {"batch_size": batch, "accum": 2, "epochs": 2, "device": "cpu", **more.get("loop", {})}
    if processes == 1:
        loop.pop("shard", None)
    return {
        "model": {"name": str(model_folder(folder / model, CONFIGS[model])), **more.get("model", {})},
        "data": {"train": str(train), "eval": str(evaluation), **text},
        "optim": more.get("optim", SGD),
        "loop": loop,
        "output": {"out": str(folder / f"{name} {processes}")},
    }


def check_equal(folder: Path, cases: dict[str, Case], launches: LaunchServer, *, ranks: int) -> None:
    """Train all cases in one launch, and hold each to a run of one process."""
    of_many = [settings(folder, name, case, ranks=ranks, processes=ranks) for name, case in cases.items()]
    done = launches.run("train", ranks=ranks, faults=[("several", {"runs": of_many})])
    assert set(done.codes.values()) == {0}, done.stderr
    assert not any(done.stderr)
    for name, case in cases.items():
        flags = settings(folder, name, case, ranks=ranks, processes=1)
        pipeline.train(pipeline.resolve_spec(flags), progress=QuietProgress())
        _check_same(folder / f"{name} 1", folder / f"{name} {ranks}", case)


def _known(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if value is not None}


def _check_same(one: Path, many: Path, case: Case) -> None:
    name = many.name
    alone, record = (json.loads((folder / "record.json").read_text()) for folder in (one, many))
    losses = case.get("losses", 1e-6)
    norms = NORM_OF_SHARDS if record["spec"]["loop"]["shard"] == "fsdp" else 1e-6
    assert len(alone["history"]) == len(record["history"]) > 1, name
    for mine, other in zip(untimed(record["history"]), untimed(alone["history"]), strict=True):
        assert mine.pop("grad_norm") == pytest.approx(other.pop("grad_norm"), rel=max(losses, norms), abs=REST), name
        assert _known(mine) == pytest.approx(_known(other), rel=losses, abs=losses), name
    for mine, other in zip(record["eval"], alone["eval"], strict=True):
        assert _known(mine) == pytest.approx(_known(other), rel=losses, abs=losses), name
    assert record["batch"]["effective"] == alone["batch"]["effective"], name
    weights, alone_weights = saved_weights(many), saved_weights(one)
    assert weights.keys() == alone_weights.keys(), name
    for key, tensor in weights.items():
        limit = case.get("weights", 1e-6)
        torch.testing.assert_close(tensor, alone_weights[key], rtol=0, atol=limit, msg=lambda text: f"{name}: {text}")


@pytest.mark.usefixtures("without_plan")
def test_two_processes_train_and_evaluate_as_one_whatever_the_rows_divide_into(
    launches: LaunchServer, tmp_path: Path
) -> None:
    check_equal(tmp_path, FAST, launches, ranks=2)


@pytest.mark.slow
@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("name", SLOW)
def test_two_processes_train_as_one_with_every_setting(name: str, launches: LaunchServer, tmp_path: Path) -> None:
    check_equal(tmp_path, {name: SLOW[name]}, launches, ranks=2)


@pytest.mark.slow
@pytest.mark.usefixtures("without_plan")
def test_four_processes_train_as_one(launches: LaunchServer, tmp_path: Path) -> None:
    # 3 rows for 4 processes: one of them never has any.
    few = {name: {**FAST[name], "rows": 3} for name in ("one row", "shards and a process without rows")}
    check_equal(tmp_path, {**FAST, **few}, launches, ranks=4)


@pytest.mark.usefixtures("without_plan")
def test_two_launches_with_the_same_seed_give_the_same_bits(launches: LaunchServer, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "dropout", TINY_DISTILBERT, dropout=0.1, attention_dropout=0.1)
    runs = []
    for name in ("one", "other"):
        flags = settings(tmp_path, name, {"settings": {"optim": ADAMW}}, ranks=2, processes=2)
        flags["model"]["name"] = str(model)
        runs.append(flags)
    done = launches.run("train", faults=[("several", {"runs": runs})])
    assert set(done.codes.values()) == {0}, done.stderr
    one, other = (tmp_path / f"{name} 2" for name in ("one", "other"))
    records = [json.loads((folder / "record.json").read_text()) for folder in (one, other)]
    assert untimed(records[0]["history"]) == untimed(records[1]["history"])
    assert records[0]["eval"] == records[1]["eval"]
    weights = saved_weights(other)
    assert all(torch.equal(tensor, weights[key]) for key, tensor in saved_weights(one).items())
