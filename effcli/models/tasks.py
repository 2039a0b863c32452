"""Tasks and the heads that transformers has for them. Transformers only inside functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError, nearest
from effcli.models.own_code import names_own_class, own_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One task: the auto class that builds it, its table of classes by model type, and whether labels are counted."""

    task: str
    auto_class: str
    table: str
    counts_labels: bool = False

    def model_class(self, config: PretrainedConfig) -> Any:
        """Return the class that the auto class builds for a configuration.

        Raises:
            UsageError: it is one of trusted code that cannot be imported.
        """
        return own_class(config, self.auto_class) or self._classes()[type(config)]

    def offers(self, config: PretrainedConfig) -> bool:
        """Return whether there is a class for a configuration: one of transformers, or of code that was trusted."""
        if names_own_class(config, self.auto_class):
            return True
        kind = type(config)
        if kind.__module__.startswith("transformers."):  # by name: two model types can share one class
            return config.model_type in _classes(self)
        return kind in self._classes()

    def _classes(self) -> Any:
        """Return transformers' table from class of configuration to class of model."""
        import transformers

        return getattr(transformers, self.table.removesuffix("_NAMES"))


HEADS = (
    Head(
        task="classification",
        auto_class="AutoModelForSequenceClassification",
        table="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        counts_labels=True,
    ),
    Head(task="causal-lm", auto_class="AutoModelForCausalLM", table="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    Head(task="masked-lm", auto_class="AutoModelForMaskedLM", table="MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    Head(
        task="seq2seq",
        auto_class="AutoModelForSeq2SeqLM",
        table="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    ),
    Head(
        task="token-classification",
        auto_class="AutoModelForTokenClassification",
        table="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        counts_labels=True,
    ),
    Head(
        task="question-answering",
        auto_class="AutoModelForQuestionAnswering",
        table="MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    ),
    Head(
        task="multiple-choice",
        auto_class="AutoModelForMultipleChoice",
        table="MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    ),
    Head(
        task="image-classification",
        auto_class="AutoModelForImageClassification",
        table="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        counts_labels=True,
    ),
    Head(
        task="audio-classification",
        auto_class="AutoModelForAudioClassification",
        table="MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
        counts_labels=True,
    ),
    Head(
        task="speech-seq2seq",
        auto_class="AutoModelForSpeechSeq2Seq",
        table="MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    ),
    Head(
        task="image-text-to-text",
        auto_class="AutoModelForImageTextToText",
        table="MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    ),
    Head(task="pretraining", auto_class="AutoModelForPreTraining", table="MODEL_FOR_PRETRAINING_MAPPING_NAMES"),
    Head(task="base", auto_class="AutoModel", table="MODEL_MAPPING_NAMES"),
)
"""In the order in which a checkpoint's own class is looked for."""
_TWO_WAY = {"cpmant", "xlnet"}
_ENCODERS_WITHOUT_MASKED_LM = {"bert-generation"}


def head_for(task: str) -> Head:
    """Return the head of a task.

    Raises:
        UsageError: there is no such task.
    """
    by_task = {head.task: head for head in HEADS}
    if task not in by_task:
        raise UsageError(f"--task '{task}': choose one of {', '.join(by_task)}.{nearest(task, by_task)}")
    return by_task[task]


def tasks_of(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the tasks that there is a class for, for one configuration."""
    return tuple(head.task for head in HEADS if head.offers(config))


def check_head(config: PretrainedConfig, task: str, *, name: str, offered: Sequence[str] | None = None) -> None:
    """Raise unless there is a class for the task; the message gives the model's `name`, and of the tasks that it has
    those that are `offered` (none: all).

    Raises:
        UsageError: it has none, or there is no such task.
    """
    head_for(task)
    if task not in tasks_of(config):
        has = [other for other in tasks_of(config) if offered is None or other in offered]
        way_out = f"use --task {' or '.join(has)}, or another --model" if has else "give another --model"
        raise UsageError(f"'{name}' ({config.model_type}) has no head for --task {task} in transformers; {way_out}")


def sees_following_tokens(config: PretrainedConfig) -> bool:
    """Return whether each position reads the tokens behind it, so that predicting those would teach nothing.

    Encoders do, unless their configuration says `is_decoder`. Of the others that have a head for causal-lm, XLNet and
    CPM-Ant do, whose forward pass hides only what a permutation or a prompt that it is given hides, and Gemma where
    `use_bidirectional_attention` says so (transformers 5.24; `vision` there means images alone).
    """
    kind = config.model_type
    if config.is_encoder_decoder:
        return False
    if kind in _TWO_WAY or getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        return True
    is_encoder = kind in _ENCODERS_WITHOUT_MASKED_LM or "masked-lm" in tasks_of(config)
    return is_encoder and not getattr(config, "is_decoder", False)


def default_task(config: PretrainedConfig) -> str:
    """Return what people fine-tune such a model for.

    Encoders get sequence classification, whatever head their checkpoint names; decoders causal language modelling;
    encoder-decoders sequence to sequence; everything else image or audio classification, or the checkpoint's own head.

    Raises:
        UsageError: transformers has none of these for the model type.
    """
    kind = config.model_type
    tasks = tasks_of(config)
    own = own_task(config)
    if own in ("image-text-to-text", "speech-seq2seq"):
        return own
    preferred = (
        ("seq2seq", "speech-seq2seq")
        if config.is_encoder_decoder
        else ("classification",)
        if sees_following_tokens(config)
        else ("causal-lm", "image-classification", "audio-classification", "classification")
    )
    found = next((task for task in preferred if task in tasks), own or next(iter(tasks), None))
    if found is None:
        raise UsageError(f"transformers has no trainable head for the model type '{kind}'")
    return found


def own_task(config: PretrainedConfig) -> str | None:
    """Return the task of the class that the checkpoint was saved from; None where it names none of ours."""
    wanted = (config.architectures or [None])[0]
    return next((head.task for head in HEADS if wanted in _names(_classes(head).get(config.model_type))), None)


def _classes(head: Head) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto

    table: Mapping[str, Any] = getattr(modeling_auto, head.table)
    return table


def _names(value: str | tuple[str, ...] | None) -> tuple[str | None, ...]:
    return value if isinstance(value, tuple) else (value,) if value is not None else ()
