"""Everything before a model is built: device, optimizer, model source, data. Cheap checks come first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from effcli.data.batches import Part
from effcli.data.columns import choose
from effcli.data.fingerprint import fingerprint
from effcli.data.source import load_tables
from effcli.data.tokenise import texts, tokenise
from effcli.data.tokenizer import build_tokenizer
from effcli.engines.window_schedule import START, Position, WindowSchedule
from effcli.errors import UsageError
from effcli.interruption import stop_if_interrupted
from effcli.measure.device_samples import Baseline
from effcli.memory.sharding.share import Sharding
from effcli.models.lengths import longest_target
from effcli.models.seq2seq import check_languages
from effcli.models.source import ModelSource, find_model, row_limit, tokenizer_for
from effcli.pipeline.settling import Settled, settings_notes, settle
from effcli.ranks.launch import Launch
from effcli.units import count, listed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from effcli.data.columns import Problem
    from effcli.data.source import RawTables
    from effcli.data.tokenise import PreparedData
    from effcli.engines.base import Progress
    from effcli.optim.entry import Hyper, OptimizerEntry
    from effcli.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run with everything decided and the data read; `spec` is the resolved one.

    `rows_fingerprint` returns that of the training rows and computes it at most once. `origin` is where the run began
    to take windows of this size: not at its start only where a resumed run changed it. `baseline` is what the device
    had in use before this process worked on it, None on a CPU.
    """

    spec: RunSpec
    entry: OptimizerEntry
    hyper: Hyper
    device: torch.device
    source: ModelSource
    raw: RawTables
    problem: Problem
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    rows_fingerprint: Callable[[], str]
    notes: tuple[str, ...]
    launch: Launch
    origin: Position = START
    baseline: Baseline | None = None

    @property
    def sharding(self) -> Sharding:
        """Return how the run is spread over the processes of its launch."""
        return Sharding(shard=self.spec.loop.shard, world_size=self.launch.world_size)

    @property
    def part(self) -> Part:
        """Return which part of each batch this process takes."""
        return Part(rank=self.launch.rank, world_size=self.launch.world_size)

    @property
    def window_schedule(self) -> WindowSchedule:
        """Return which rows each update takes."""
        loop = self.spec.loop
        return WindowSchedule(
            num_rows=self.data.train_rows,
            batch_size=loop.batch_size,
            accum=loop.accum,
            world_size=self.launch.world_size,
            origin=self.origin,
        )

    @property
    def total_updates(self) -> int:
        """Return `--max-steps`, or else the epochs' updates."""
        return self.spec.loop.max_steps or self.window_schedule.total_updates(self.spec.loop.epochs)


def prepare(spec: RunSpec, progress: Progress) -> Prepared:
    """Return the run, ready to be built; says aloud what was guessed.

    Raises:
        EffcliError: whatever is wrong with specification, device, optimizer, model or data, in that order.
    """
    notes: list[str] = []

    def say(*sentences: str) -> None:
        for sentence in sentences:
            notes.append(sentence)
            progress.note(sentence)
        stop_if_interrupted()

    settled = settle(spec)
    spec = settled.spec
    say(*settings_notes(settled))
    source = find_model(spec.model.name, trust_remote_code=spec.model.trust_remote_code)
    raw = load_tables(spec.data, seed=spec.loop.seed)
    problem = choose(
        raw,
        spec,
        is_decoder=source.is_decoder,
        architectures=source.architectures,
        is_encoder_decoder=bool(source.config.is_encoder_decoder),
    )
    say(*raw.notes, *problem.notes, *_classes(problem))

    def build(**settings: Any) -> PreTrainedTokenizerBase:
        if source.path is not None:
            say(f"'{source.name}' has no tokenizer: one was built from the training text.")
        return build_tokenizer(texts(raw, problem, progress.rows), **settings)

    tokenizer = tokenizer_for(source, build)
    max_length = row_limit(source, tokenizer, spec.data.max_length)
    max_target_length = _target_limit(spec, problem, source, tokenizer, max_length)
    data = tokenise(
        raw,
        problem,
        tokenizer,
        max_length=max_length,
        max_target_length=max_target_length or 0,
        watch=progress.rows,
    )
    say(*_data_notes(data, max_length, max_target_length))
    return Prepared(
        spec=_resolved(settled, problem, max_length=max_length, max_target_length=max_target_length),
        entry=settled.entry,
        hyper=settled.hyper,
        device=settled.device,
        source=source,
        raw=raw,
        problem=problem,
        tokenizer=tokenizer,
        data=data,
        rows_fingerprint=cache(lambda: fingerprint(data.train)),
        notes=tuple(notes),
        launch=settled.launch,
        baseline=settled.baseline,
    )


def _data_notes(data: PreparedData, max_length: int, max_target_length: int | None) -> Iterator[str]:
    """Yield what became of rows on their way to tokens."""
    if data.truncated_rows:
        yield f"{count(data.truncated_rows, 'row')} truncated to {max_length} tokens."
    if data.truncated_targets:
        yield f"{count(data.truncated_targets, 'target')} truncated to {max_target_length} tokens."
    if data.skipped_rows:
        yield f"{count(data.skipped_rows, 'row')} without text skipped."
    if data.eval is None:
        yield "Evaluation is skipped: there is no validation data (give --eval-data or --eval-fraction)."


def _target_limit(
    spec: RunSpec, problem: Problem, source: ModelSource, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> int | None:
    """Return the longest target in tokens; None where no text is written.

    Raises:
        UsageError: a length that the decoder does not reach or that nothing is cut to, or no target language.
    """
    asked = spec.data.max_target_length
    if problem.target_column is None:
        if asked is not None:
            raise UsageError(f"--max-target-length {asked}: --task {problem.task} writes no text; leave it out")
        return None
    check_languages(tokenizer, source.name)
    return longest_target(source.config, source.name, asked, longest_source=max_length)


def _resolved(settled: Settled, problem: Problem, *, max_length: int, max_target_length: int | None) -> RunSpec:
    """Return the spec with everything that was guessed or defaulted written out, so that it is itself a recipe."""
    spec, entry = settled.spec, settled.entry
    model = {"task": problem.task}
    data = {
        "text_columns": problem.text_columns,
        "label_column": problem.label_column,
        "max_length": max_length,
        "max_target_length": max_target_length,
    }
    optim = {
        "name": entry.name,
        "lr": settled.hyper.get("lr"),
        "weight_decay": spec.optim.weight_decay if entry.takes_weight_decay else 0.0,
    }
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update=model),
            "data": spec.data.model_copy(update=data),
            "optim": spec.optim.model_copy(update=optim),
        }
    )


def _classes(problem: Problem) -> tuple[str, ...]:
    """Return which class is which, and whose F1 is reported."""
    if problem.objective != "classification" or problem.labels is None:
        return ()
    names = problem.labels.names
    named = listed([f"{index} = {name}" for index, name in enumerate(names)], shown=5)
    f1 = f"F1 is that of {names[1]}" if len(names) == 2 else "F1 is the unweighted mean over classes"
    return (f"Classes: {named}. {f1}.",)
