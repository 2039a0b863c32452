"""`build_spec`: texts take the declared type, and every fault is named in one line."""

from __future__ import annotations

import pytest

from effcli.errors import UsageError
from effcli.flags import FLAG_OF, field_label, nest
from effcli.spec import RunSpec, Section, build_spec


def fault(**sections: object) -> str:
    with pytest.raises(UsageError) as caught:
        build_spec(sections)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_nothing_given_is_the_documented_defaults() -> None:
    spec = build_spec({})
    assert spec == RunSpec()
    assert spec.uses_builtin_demo
    assert (spec.optim.name, spec.optim.weight_decay, spec.optim.min_8bit_size) == ("adamw", 0.01, None)
    loop = spec.loop
    assert (loop.batch_size, loop.accum, loop.epochs, loop.max_steps, loop.seed) == (8, 1, 3, None, 42)
    assert (loop.scheduler, loop.warmup_ratio, loop.max_grad_norm) == ("linear", 0.0, 1.0)
    assert (spec.output.keep, spec.output.logging_steps, spec.output.save_every) == (2, 10, None)


def test_a_value_below_its_range_names_flag_field_value_and_limit() -> None:
    assert fault(loop={"accum": 0}) == "--accum (loop.accum): 0 is below the smallest allowed value 1"


def test_a_number_given_as_text_is_shown_as_the_user_wrote_it() -> None:
    assert fault(loop={"accum": "-3"}) == "--accum (loop.accum): -3 is below the smallest allowed value 1"


def test_every_fault_is_in_the_one_message() -> None:
    text = fault(loop={"accum": 0, "epochs": "many"}, optim={"beta1": 1}, data={"max_length": 1})
    assert text.startswith("4 faults: ")
    for field in ("--accum (loop.accum)", "--epochs (loop.epochs)", "--beta1 (optim.beta1)", "--max-length"):
        assert field in text


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("loop", "engine", "pytroch", "'pytroch' is not one of pytorch, accelerate, trainer. Did you mean 'pytorch'?"),
        ("loop", "precision", "int4", "'int4' is not one of fp32, bf16, fp16, bf16-pure"),
        ("loop", "device", "gpu", "'gpu' is not a device; give auto, cpu, cuda or cuda:0"),
        ("loop", "device", "cuda:", "is not a device"),
        ("loop", "batch_size", "eight", "'eight' is not a whole number"),
        ("loop", "epochs", "1.5", "1.5 is not a whole number"),
        ("loop", "epochs", None, "an empty value is not a whole number"),
        ("loop", "seed", 2**32, "4294967296 is not below 4294967296"),
        ("loop", "warmup_ratio", "1", "1 is not below 1"),
        ("loop", "gradient_checkpointing", "maybe", "'maybe' is neither true nor false"),
        ("optim", "lr", "fast", "'fast' is not a number"),
        ("optim", "lr", "nan", "is not a finite number"),
        ("optim", "lr", -1e-4, "-0.0001 is below the smallest allowed value 0"),
        ("optim", "name", "", "the text is empty"),
        ("optim", "args", {"betas": [0.9, 0.99]}, "betas has no single value"),
        ("optim", "args", {"eps": "1e999"}, "eps is not a finite number"),
        ("data", "text_columns", ["a", "b", "c"], "3 values given, at most 2 allowed"),
        ("data", "text_columns", ["a", "a"], "'a' is given twice"),
        ("data", "delimiter", ";;", "';;' is not one character"),
        ("data", "encoding", "utf-9", "'utf-9' is not a known text encoding"),
        ("output", "keep", True + 0.5, "1.5 is not a whole number"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(section: str, key: str, value: object, words: str) -> None:
    text = fault(**{section: {key: value}})
    assert words in text
    assert text.startswith(FLAG_OF[f"{section}.{key}"])


def test_the_label_column_must_not_be_a_text_column() -> None:
    text = fault(data={"text_columns": ["a", "b"], "label_column": "b"})
    assert text == "--label-column (data.label_column): 'b' is a text column as well; name another column"


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(fault(loop={"engine": "x" * 10_000})) < 200


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"loop": {"acum": 2}}, "loop.acum: unknown key. Did you mean 'accum'?"),
        ({"loop": {"lr": 2}}, "loop.lr: unknown key. Did you mean 'optim.lr'?"),
        ({"accum": 2}, "accum: unknown key. Did you mean 'loop.accum'?"),
        ({"optimiser": {}}, "optimiser: unknown key. Did you mean 'optim'?"),
        ({"zzz": 1}, "zzz: unknown key; the sections are model, data, optim, loop, output"),
        (
            {"output": {"zzz": 1}},
            "output.zzz: unknown key; output has out, save_every, keep, logging_steps, track, tolerance",
        ),
    ],
)
def test_an_unknown_key_is_an_error_that_says_where_to_go(values: dict[str, object], hint: str) -> None:
    assert fault(**values) == hint


def test_a_section_that_is_no_mapping_is_refused() -> None:
    assert fault(loop="fast") == "loop: 'fast' is not a section of keys with values"


def test_an_empty_section_is_all_defaults() -> None:
    assert build_spec({"loop": None, "data": {}}) == RunSpec()


def test_texts_become_the_type_that_the_field_declares() -> None:
    spec = build_spec(
        {
            "optim": {
                "lr": "1e-4",
                "args": {"momentum": "0.9", "nesterov": "true", "steps": "3", "mode": "no", "beta1": None},
            },
            "loop": {"accum": "2", "gradient_checkpointing": "no"},
            "data": {"label_column": "no", "text_columns": "sentence"},
        }
    )
    assert spec.optim.lr == 0.0001
    assert spec.optim.args == {"momentum": 0.9, "nesterov": True, "steps": 3, "mode": "no", "beta1": "none"}
    assert [type(value) for value in spec.optim.args.values()] == [float, bool, int, str, str]
    assert spec.loop.accum == 2
    assert spec.loop.gradient_checkpointing is False
    assert spec.data.label_column == "no"
    assert spec.data.text_columns == ("sentence",)


@pytest.mark.parametrize("text", ["\\t", "tab", "\t"])
def test_a_tab_can_be_typed_as_delimiter(text: str) -> None:
    assert build_spec({"data": {"delimiter": text}}).data.delimiter == "\t"


def test_every_field_has_a_flag_and_every_flag_a_field() -> None:
    fields = {
        f"{section}.{key}"
        for section, field in RunSpec.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        for key in field.annotation.model_fields
    }
    assert fields == set(FLAG_OF)
    assert len(set(FLAG_OF.values())) == len(FLAG_OF)


def test_every_field_has_a_description() -> None:
    for section in RunSpec.model_fields.values():
        assert isinstance(section.annotation, type)
        for name, field in section.annotation.model_fields.items():
            assert field.description, name


def test_a_place_inside_a_field_is_named_after_its_flag() -> None:
    assert field_label("data.text_columns.2") == "--text-column (data.text_columns.2)"
    assert field_label("model") == "model"


def test_dotted_values_nest_into_sections() -> None:
    assert nest({"loop.accum": 2, "loop.seed": 1, "optim.args.momentum": 0.9}) == {
        "loop": {"accum": 2, "seed": 1},
        "optim": {"args": {"momentum": 0.9}},
    }
