"""Print how much slower an update is with effcli than in the shortest loop that does the same.

The same model, rows, batches and optimizer: for the pytorch engine beside a loop written by hand, for accelerate and
trainer beside these libraries alone. Whole runs of `effcli.pipeline.train`, with plan, probes, meters, history and
progress, and bare loops in a process of their own take turns, update by update, so that both meet the same moods of
the machine. The updates of a run after the first are timed, from one to the next, on one thread. Wall time is what
counts; time of the processor is beside it, since other work on a machine leaves it be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import SimpleQueue, get_context
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from effcli import pipeline
from effcli.data.batches import collator, train_loader
from effcli.pipeline.build import build, build_scheduler
from effcli.pipeline.prepare import Prepared, prepare
from effcli.report.progress import QuietProgress

PAIRS = 5
UPDATES = 9
"""Of each run; the first is not timed."""
ROWS = 400
WORDS_PER_ROW = 62
"""64 tokens with the special ones."""
MODEL = {"model_type": "distilbert", "vocab_size": 8000, "dim": 512, "n_layers": 6, "n_heads": 8, "hidden_dim": 2048,
    "max_position_embeddings": 64}  # fmt: skip


@dataclass
class Stopwatch(QuietProgress):
    """Times the updates of one side, in turns with the other side."""

    mine: Semaphore
    other: Semaphore
    began: tuple[float, float] | None = None
    took: list[tuple[float, float]] = field(default_factory=list)

    def read(self) -> None:
        """Take the time since the side's turn began, and let the other side make an update."""
        if self.began is not None:
            self.took.append((time.perf_counter() - self.began[0], time.process_time() - self.began[1]))
        self.other.release()
        self.mine.acquire()
        self.began = time.perf_counter(), time.process_time()

    def update(self, **facts: Any) -> None:
        """Take the time where a run says that an update is done."""
        self.read()

    def per_update_s(self) -> tuple[float, float]:
        """Return wall seconds and processor seconds of an update."""
        assert len(self.took) == UPDATES - 1
        wall, processor = zip(*self.took, strict=True)
        return statistics.mean(wall), statistics.mean(processor)


def with_effcli(flags: dict[str, Any], watch: Stopwatch) -> None:
    """Make the updates with effcli."""
    with tempfile.TemporaryDirectory() as out:
        pipeline.train(pipeline.resolve_spec({**flags, "output": {"out": f"{out}/run"}}), progress=watch)


@dataclass(frozen=True)
class Parts:
    """What a bare loop is given."""

    prepared: Prepared
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any


def parts(flags: dict[str, Any]) -> Parts:
    """Return model, optimizer and batches as a run has them."""
    prepared = prepare(pipeline.resolve_spec(flags), QuietProgress())
    built = build(prepared, meta=False)
    optimizer = AdamW(built.groups, lr=prepared.hyper["lr"])
    batch_size = prepared.spec.loop.batch_size
    collate = collator(prepared.problem, prepared.tokenizer, prepared.source.padding_side)
    loader = train_loader(prepared.data.train, collate, batch_size=batch_size, seed=42, num_workers=0)
    return Parts(prepared, built.model.train(), optimizer, build_scheduler(prepared, optimizer), loader)


def by_hand(flags: dict[str, Any], watch: Stopwatch) -> None:
    """Make the updates in the shortest loop."""
    given = parts(flags)
    for _, batch in zip(range(UPDATES), given.loader, strict=False):
        given.model(**batch).loss.backward()
        clip_grad_norm_(given.model.parameters(), 1.0)
        given.optimizer.step()
        given.scheduler.step()
        given.optimizer.zero_grad()
        watch.read()


def bare_accelerate(flags: dict[str, Any], watch: Stopwatch) -> None:
    """Make the updates with Accelerate alone."""
    given = parts(flags)
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = accelerator.prepare(
        given.model, given.optimizer, given.scheduler, given.loader
    )
    for _, batch in zip(range(UPDATES), loader, strict=False):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        watch.read()


def bare_trainer(flags: dict[str, Any], watch: Stopwatch) -> None:
    """Make the updates with Trainer alone."""

    class Watch(TrainerCallback):
        def on_step_end(self, *arguments: Any, **kwargs: Any) -> None:
            watch.read()

    given = parts(flags)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=UPDATES, per_device_train_batch_size=given.prepared.spec.loop.batch_size,
            use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model=given.model, args=arguments, train_dataset=given.prepared.data.train,
            data_collator=given.loader.collate_fn, optimizers=(given.optimizer, given.scheduler), callbacks=[Watch()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()


BARE: dict[str, Callable[[dict[str, Any], Stopwatch], None]] = {
    "pytorch": by_hand,
    "accelerate": bare_accelerate,
    "trainer": bare_trainer,
}


def side(
    make: Callable[[dict[str, Any], Stopwatch], None],
    flags: dict[str, Any],
    pairs: int,
    turns: tuple[Semaphore, Semaphore],
    results: SimpleQueue[list[tuple[float, float]]],
    begins: bool,
) -> None:
    """Make all runs of one side; `turns` are its own and the other side's."""
    torch.set_num_threads(1)
    mine, other = turns
    if not begins:
        mine.acquire()
    took = []
    for _ in range(pairs):
        watch = Stopwatch(mine, other)
        make(flags, watch)
        took.append(watch.per_update_s())
    other.release()
    results.put(took)


def compare(engine: str, flags: dict[str, Any], pairs: int) -> None:
    """Print milliseconds and ratios of one engine."""
    flags = {**flags, "loop": {**flags["loop"], "engine": engine}}
    context = get_context("spawn")
    first, second = context.Semaphore(0), context.Semaphore(0)
    sides = (BARE[engine], (first, second), True), (with_effcli, (second, first), False)
    queues: list[SimpleQueue[list[tuple[float, float]]]] = [context.SimpleQueue() for _ in sides]
    processes = [
        context.Process(target=side, args=(make, flags, pairs, turns, queue, begins))
        for (make, turns, begins), queue in zip(sides, queues, strict=True)
    ]
    for process in processes:
        process.start()
    bare_took, effcli_took = (queue.get() for queue in queues)
    for process in processes:
        process.join()
    for clock, name in enumerate(("wall", "processor")):
        bare, ours = ([readings[clock] for readings in took] for took in (bare_took, effcli_took))
        ratios = [one / other for one, other in zip(ours, bare, strict=True)]
        print(
            f"{engine:10}  {name:9}  {statistics.median(bare) * 1000:8.1f}  {statistics.median(ours) * 1000:8.1f}  "
            f"{statistics.median(ratios):6.4f}  {' '.join(f'{ratio:.3f}' for ratio in ratios)}",
            flush=True,
        )


def main() -> None:
    """Run the comparison for every engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--engine", action="append", choices=list(BARE))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, data = Path(folder) / "model", Path(folder) / "rows.csv"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        rows = [
            f"{' '.join(f'w{(row * 7 + word) % 5000}' for word in range(WORDS_PER_ROW))},{row % 2}"
            for row in range(ROWS)
        ]
        data.write_text("\n".join(["sentence,label", *rows]) + "\n")
        flags = {
            "model": {"name": str(model)},
            "data": {"train": str(data)},
            "loop": {"batch_size": 8, "max_steps": UPDATES, "seed": 42},
        }
        print("engine      clock      bare, ms    effcli  ratio   of each pair")
        for engine in options.engine or BARE:
            compare(engine, flags, options.pairs)


if __name__ == "__main__":
    main()
