"""Folding of parameter shapes: what is folded comes out as it was, and equal layers are written once."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from effcli.shapes import NUM_LABELS, ModelShapes, from_json, mark_num_labels, to_json
from effcli.units import ParamInfo

names = st.lists(st.sampled_from(["a", "layer", "0", "1", "2", "10", "norm"]), min_size=1, max_size=5).map(".".join)


def shapes(*rows: tuple[str, tuple[int, ...]]) -> ModelShapes:
    return ModelShapes(
        architecture="Net", task="base", parameters=tuple(ParamInfo(name=name, shape=shape) for name, shape in rows)
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(names, st.lists(st.integers(1, 3), max_size=2).map(tuple), *[st.booleans()] * 2), max_size=12
    )
)
def test_whatever_is_folded_unfolds_to_the_same_in_the_same_order(rows) -> None:
    parameters = tuple(ParamInfo(name=name, shape=shape, hidden=h, trainable=t) for name, shape, h, t in rows)
    model = ModelShapes(architecture="Net", task="base", parameters=parameters, tied=("head",), buffers_bytes=8)
    assert from_json(json.loads(json.dumps(to_json(model)))) == model


def test_equal_layers_are_written_once_and_a_different_one_apart() -> None:
    model = shapes(
        *((f"h.{index}.w", (4, 4)) for index in range(3)), ("h.3.w", (5, 4)), ("h.4.w", (5, 4)), ("head", (2,))
    )
    assert to_json(model)["parameters"] == [
        {"layers": "h.", "from": 0, "repeat": 3, "each": [[".w", [4, 4]]]},
        {"layers": "h.", "from": 3, "repeat": 2, "each": [[".w", [5, 4]]]},
        ["head", [2]],
    ]


def test_the_number_of_labels_is_told_from_an_equal_hidden_size() -> None:
    two, three = (to_json(shapes(("body", (2, 2)), ("head", (labels, 2)))) for labels in (2, 3))
    marked = mark_num_labels(two, three, 2)
    assert marked["parameters"] == [["body", [2, 2]], ["head", [NUM_LABELS, 2]]]
    assert from_json(marked, num_labels=7).parameters[1].shape == (7, 2)
