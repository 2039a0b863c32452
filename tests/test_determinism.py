"""The same seed gives the same run, bit for bit: whatever ran before, beside and around it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, DistilBertForSequenceClassification

from effcli import pipeline
from effcli.measure.record import RunRecord
from effcli.pipeline.run_plan import RunPlanner
from effcli.report.progress import LineProgress, QuietProgress
from tests.commands import TINY_DISTILBERT, model_folder, saved_weights
from tests.forked_runs import ForkServer
from tests.jobs import ENGINES, ONE_FAST_ENGINE
from tests.stopped_runs import settings

slow = pytest.mark.slow


@dataclass(frozen=True)
class Outcome:
    """What a run left: a hash of its weights, and its losses and gradient norms."""

    weights: str
    losses: tuple[float | None, ...]
    grad_norms: tuple[float | None, ...]

    @classmethod
    def of(cls, record: RunRecord, out: Path) -> Outcome:
        digest = hashlib.sha256()
        for name, value in sorted(saved_weights(out).items()):
            digest.update(name.encode() + value.numpy().tobytes())
        return cls(
            weights=digest.hexdigest(),
            losses=tuple(line.loss for line in record.history),
            grad_norms=tuple(line.grad_norm for line in record.history),
        )


@dataclass
class Laboratory:
    """Makes runs of ten updates with dropout; `batches` are the input ids that the last one's model was given."""

    folder: Path
    batches: list[torch.Tensor]
    references: dict[tuple[str, str], tuple[Outcome, list[torch.Tensor]]] = field(default_factory=dict)
    num_runs: int = 0

    def flags(self, engine: str, kind: str = "weights", **sections: dict[str, Any]) -> dict[str, Any]:
        """Return settings; the model has only random weights, or `weights` for all but its head."""
        self.num_runs += 1
        flags = settings(self.folder, f"run-{self.num_runs}", {"name": "adamw"}, engine=engine)
        flags["model"]["name"] = str(self.folder / ("encoder" if kind == "random" else "body"))
        return {section: {**values, **sections.get(section, {})} for section, values in flags.items()}

    def run(self, engine: str, kind: str = "weights", **sections: dict[str, Any]) -> Outcome:
        """Return the outcome of a run that no plan precedes, after other random numbers were drawn."""
        torch.rand(17), np.random.random(17), random.random()
        self.batches.clear()
        flags = self.flags(engine, kind, **sections)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunPlanner, "plan", lambda *arguments: None)
            record = pipeline.train(pipeline.resolve_spec(flags), progress=QuietProgress())
        return Outcome.of(record, Path(flags["output"]["out"]))

    def reference(self, engine: str, kind: str = "weights") -> Outcome:
        """Return the outcome of the first run of these tests with an engine."""
        return self._reference(engine, kind)[0]

    def batches_of(self, engine: str) -> list[torch.Tensor]:
        """Return the input ids of every forward pass of that run."""
        return self._reference(engine, "weights")[1]

    def _reference(self, engine: str, kind: str) -> tuple[Outcome, list[torch.Tensor]]:
        if (engine, kind) not in self.references:
            self.references[engine, kind] = (self.run(engine, kind), list(self.batches))
        return self.references[engine, kind]


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    folder, batches = tmp_path_factory.mktemp("runs"), []
    made = model_folder(folder / "encoder", TINY_DISTILBERT, dropout=0.1)
    torch.manual_seed(5)
    AutoModel.from_config(AutoConfig.from_pretrained(made)).save_pretrained(folder / "body")
    forward = DistilBertForSequenceClassification.forward

    @functools.wraps(forward)
    def recorded(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.training and type(input_ids) is torch.Tensor and input_ids.device.type == "cpu":  # not while traced
            batches.append(input_ids.clone())
        return forward(self, input_ids, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistilBertForSequenceClassification, "forward", recorded)
        yield Laboratory(folder, batches)


@pytest.mark.parametrize("kind", ["weights", pytest.param("random", marks=slow)])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_seed_gives_the_same_run_whatever_ran_before(engine: str, kind: str, laboratory: Laboratory) -> None:
    first = laboratory.reference(engine, kind)
    laboratory.reference(ENGINES[ENGINES.index(engine) - 1], kind)
    assert laboratory.run(engine, kind) == first
    assert len(set(first.losses)) == 10


@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_another_seed_gives_another_head_order_and_run(engine: str, laboratory: Laboratory) -> None:
    still: dict[str, Any] = {"optim": {"lr": 0.0}, "loop": {"max_steps": 2}}
    first = laboratory.run(engine, **still)
    heads = [saved_weights(laboratory.folder / f"run-{laboratory.num_runs}")]
    second = laboratory.run(engine, optim=still["optim"], loop={"max_steps": 2, "seed": 7})
    heads.append(saved_weights(laboratory.folder / f"run-{laboratory.num_runs}"))
    drawn = {"pre_classifier.weight", "classifier.weight"}
    assert {name for name, value in heads[0].items() if not torch.equal(value, heads[1][name])} == drawn
    assert first.losses[0] != second.losses[0]
    assert not same(laboratory.batches, laboratory.batches_of(engine)[:4])


@pytest.mark.parametrize(
    ("engine", "num_workers"),
    [("pytorch", 2), ("trainer", 1)]
    + [pytest.param(*case, marks=slow) for case in (("pytorch", 1), ("accelerate", 1), ("accelerate", 2))],
)
def test_data_workers_change_nothing(engine: str, num_workers: int, laboratory: Laboratory) -> None:
    assert laboratory.run(engine, loop={"num_workers": num_workers}) == laboratory.reference(engine)


VARIATIONS: list[dict[str, dict[str, Any]]] = [
    {"data": {"eval": None}},
    {"output": {"logging_steps": 1}},
    {"output": {"save_every": 1, "keep": 1}},
    {"loop": {"eval_batch_size": 5}},
]


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"eval": None}, "output": {"save_every": 3, "keep": 1, "logging_steps": 1}},
        *(pytest.param(sections, marks=slow) for sections in VARIATIONS),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_happens_around_the_updates_changes_none_of_them(
    engine: str, sections: dict[str, dict[str, Any]], laboratory: Laboratory
) -> None:
    assert laboratory.run(engine, **sections) == laboratory.reference(engine)


@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_neither_plan_nor_progress_changes_a_run(
    engine: str, laboratory: Laboratory, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, flags = laboratory.reference(engine), laboratory.flags(engine)
    spec = pipeline.resolve_spec(flags)
    pipeline.plan(spec, progress=QuietProgress())
    record = pipeline.train(spec, progress=LineProgress(1))
    assert record.optimizer.plan is not None
    assert record.optimizer.plan.peak_allocated_bytes
    assert "update 10/10" in capsys.readouterr().err
    assert Outcome.of(record, Path(flags["output"]["out"])) == expected


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return whether two lists of batches are equal."""
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_every_engine_gives_its_model_the_same_batches_and_each_row_once_an_epoch(laboratory: Laboratory) -> None:
    order = laboratory.batches_of("pytorch")
    assert same(order, laboratory.batches_of("accelerate"))
    assert same(order, laboratory.batches_of("trainer"))
    epochs = order[:10], order[10:]  # 20 rows, 2 a batch
    rows = [sorted(str(row[row != 0].tolist()) for batch in epoch for row in batch) for epoch in epochs]
    assert len(rows[0]) == 20
    assert rows[0] == rows[1]
    assert not same(*epochs)


def test_engines_give_the_same_losses_with_dropout(laboratory: Laboratory) -> None:
    first, *others = (laboratory.reference(engine) for engine in ENGINES)
    for other in others:
        assert other.losses == pytest.approx(first.losses, rel=1e-6)
        assert other.grad_norms == pytest.approx(first.grad_norms, rel=1e-5)


def test_a_fresh_process_with_another_hash_seed_gives_the_same_run(
    fresh_process: ForkServer, laboratory: Laboratory
) -> None:
    expected, flags = laboratory.reference("pytorch"), laboratory.flags("pytorch")
    recipe = laboratory.folder / "recipe.yaml"
    recipe.write_text(json.dumps(flags))
    assert fresh_process.run("train", "--recipe", recipe).code == 0, fresh_process.log
    out = Path(flags["output"]["out"])
    assert Outcome.of(RunRecord.model_validate_json((out / "record.json").read_text()), out) == expected


SCRIPT = """
import json, sys
from effcli import pipeline
from effcli.pipeline.run_plan import RunPlanner
from effcli.report.progress import QuietProgress
RunPlanner.plan = lambda *arguments: None
pipeline.train(pipeline.resolve_spec(json.loads(sys.argv[1])), progress=QuietProgress())
"""


@slow
@pytest.mark.parametrize("hash_seed", ["1", "2"])
@pytest.mark.parametrize("kind", ["weights", "random"])
@pytest.mark.parametrize("engine", ENGINES)
def test_another_process_with_another_hash_seed_gives_the_same_run(
    engine: str, kind: str, hash_seed: str, laboratory: Laboratory
) -> None:
    expected, flags = laboratory.reference(engine, kind), laboratory.flags(engine, kind)
    threads = str(torch.get_num_threads())  # another number sums in another order
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(flags)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": threads},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = Path(flags["output"]["out"])
    assert Outcome.of(RunRecord.model_validate_json((out / "record.json").read_text()), out) == expected
