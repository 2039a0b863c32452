"""Runs the command line inside the test process, on tiny models and files made by the test."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from effcli.cli.app import app
from effcli.cli.boundary import run_guarded

TINY_DISTILBERT = {
    "model_type": "distilbert", "vocab_size": 1000, "dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128,
    "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
}  # fmt: skip
TINY_GPT2 = {
    "model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What a command said, and its exit code."""

    code: int
    stdout: str
    stderr: str

    @property
    def record(self) -> dict[str, Any]:
        """Return the one JSON document on stdout."""
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)

    @property
    def error(self) -> str:
        """Return the error, which is the last line of stderr and the only one that is no note."""
        lines = self.stderr.splitlines()
        assert "Traceback" not in self.stderr
        assert sum(line.startswith("effcli: error: ") for line in lines) == 1, self.stderr
        return lines[-1].removeprefix("effcli: error: ")


def effcli(*arguments: object) -> Result:
    """Return the result of `effcli ARGUMENTS`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_guarded(lambda: app([str(part) for part in arguments], standalone_mode=False), verbose=False)
    return Result(code, out.getvalue(), err.getvalue())


def data_flags(task: str, data: Path) -> tuple[object, ...]:
    """Return the flags that let a file of sentences with labels train a task."""
    return ("--data", data, *(("--task", "causal-lm", "--text-column", "sentence") if task == "causal-lm" else ()))


def saved_weights(out: Path) -> dict[str, torch.Tensor]:
    """Return the weights, or the adapters, of the final model of a run."""
    (path,) = (out / "model").glob("*model.safetensors")
    return load_file(path)


def same_weights(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two models have the same weights by the same names, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def model_folder(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Return a folder that holds nothing but a `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def untimed(history: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the lines of a history, of a record or of its JSON, without the seconds that each run takes anew."""
    lines = (line if isinstance(line, dict) else line.model_dump() for line in history)
    return [{key: value for key, value in line.items() if key != "training_s"} for line in lines]


def csv_file(path: Path, rows: int = 12, *, header: str = "sentence,label") -> Path:
    """Return a CSV file of sentences of 2 to 8 words with two labels."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = [
        f"{' '.join(words[(index + step) % 10] for step in range(2 + index * 3 % 7))},{index % 2}"
        for index in range(rows)
    ]
    path.write_text("\n".join([header, *lines]) + "\n")
    return path
