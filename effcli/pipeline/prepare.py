"""Everything before a model is built: device, optimizer, model source, data. Cheap checks come first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from effcli.data.columns import choose
from effcli.data.fingerprint import fingerprint
from effcli.data.source import load_tables
from effcli.data.tokenise import texts, tokenise
from effcli.data.tokenizer import build_tokenizer
from effcli.devices import (
    activate,
    check_precision,
    has_unseen_card,
    resolve_device,
    weights_dtype,
)
from effcli.engines.compiling import check_compiles
from effcli.engines.window_schedule import START, Position, WindowSchedule
from effcli.errors import UsageError
from effcli.interruption import stop_if_interrupted
from effcli.measure.device_monitor import read_baseline
from effcli.measure.device_samples import Baseline
from effcli.models.attention import check_attention, check_attention_runs
from effcli.models.flags import check_model_flags
from effcli.models.lengths import longest_target
from effcli.models.seq2seq import check_languages
from effcli.models.source import ModelSource, find_model, row_limit, tokenizer_for
from effcli.optim import registry
from effcli.optim.overrides import override_notes
from effcli.tracking.services import check_services
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
    origin: Position = START
    baseline: Baseline | None = None

    @property
    def window_schedule(self) -> WindowSchedule:
        """Return which rows each update takes."""
        loop = self.spec.loop
        return WindowSchedule(
            num_rows=self.data.train_rows, batch_size=loop.batch_size, accum=loop.accum, origin=self.origin
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

    settled = _settle(spec)
    spec = settled.spec
    say(*_settings_notes(settled))
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
        baseline=settled.baseline,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settled:
    """What is decided before anything is read; `spec` has the schedule that the optimizer bears."""

    spec: RunSpec
    device: torch.device
    entry: OptimizerEntry
    hyper: Hyper
    baseline: Baseline | None


def _settle(spec: RunSpec) -> _Settled:
    """Return device and optimizer; whatever can be refused without reading anything is refused here.

    Raises:
        EffcliError: see `prepare`.
    """
    quiet_transformers()
    check_services(spec.output.track)
    check_model_flags(spec.model)
    device = resolve_device(spec.loop.device)
    baseline = read_baseline(device, interval_s=spec.loop.nvml_interval)
    activate(device)
    check_precision(spec.loop.precision, device)
    if spec.loop.compile:
        check_compiles(device)
    check_attention(spec.model.attn, spec.loop.precision)
    check_attention_runs(spec.model.attn, str(device))
    entry = registry.find(spec.optim.name)
    hyper = registry.resolve_hyper(entry, spec.optim)
    spec = _settle_schedule(spec, entry, hyper)
    registry.check_works(entry, str(device), hyper, weights_dtype(spec.loop.precision))
    return _Settled(spec=spec, device=device, entry=entry, hyper=hyper, baseline=baseline)


def _settings_notes(settled: _Settled) -> Iterator[str]:
    """Yield what should be known about the settings themselves."""
    spec, entry = settled.spec, settled.entry
    if spec.loop.device == "auto" and settled.device.type == "cpu" and has_unseen_card():
        yield "torch does not see this machine's NVIDIA card: the run is on the CPU. `effcli doctor` says why."
    yield from override_notes(entry, settled.hyper)
    if spec.uses_builtin_demo:
        yield (
            "This is the built-in demonstration: a small model with random weights on generated sentence pairs. "
            "For your own work give --model and --data."
        )
    if entry.cpu_note and settled.device.type == "cpu":
        yield entry.cpu_note
    if spec.loop.compile:
        yield (
            "--compile: the first batches wait for the compiler. The plan is of the model uncompiled: compiled kernels "
            "may keep less for the backward pass."
        )
    if spec.loop.precision == "bf16-pure":
        yield (
            "bf16-pure keeps no 32-bit copy of the weights: an update below about 0.2 % of a weight is rounded away. "
            "With --precision bf16 small updates count."
        )
    if spec.model.trust_remote_code:
        yield f"Python code that comes with '{spec.model.name}' may run here (--trust-remote-code)."


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


def quiet_transformers() -> None:
    """Keep progress bars and advice of transformers off the terminal; `quiet_datasets` does so where data is read."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _settle_schedule(spec: RunSpec, entry: OptimizerEntry, hyper: Hyper) -> RunSpec:
    """Return the spec with a constant schedule where the optimizer bears no other.

    Raises:
        UsageError: a schedule or a warm-up was asked for as well.
    """
    bears = entry.schedule(hyper)
    if bears == "any":
        return spec
    loop = spec.loop
    scheduled = "scheduler" in loop.model_fields_set and loop.scheduler != "constant"
    if scheduled or (bears == "own" and loop.warmup_ratio):
        flag = f"--scheduler {loop.scheduler}" if scheduled else f"--warmup-ratio {loop.warmup_ratio}"
        why = "sets its own learning rate" if bears == "own" else "needs a constant learning rate"
        raise UsageError(f"{flag}: '{entry.name}' {why} with these hyperparameters; leave the flag out")
    return spec.model_copy(update={"loop": loop.model_copy(update={"scheduler": "constant"})})


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


def _resolved(settled: _Settled, problem: Problem, *, max_length: int, max_target_length: int | None) -> RunSpec:
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
