"""Calls code with values that hypothesis makes up: an error of ours in one line is as good as none."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effcli.cli.boundary import MAX_ERROR_CHARACTERS, run_guarded
from effcli.errors import EffcliError

thorough = pytest.mark.parametrize("factor", [1, pytest.param(16, marks=pytest.mark.slow)])
"""Few examples in the fast tests, the same ones each time; many in the slow ones."""


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], object], *, examples: int) -> None:
    """Call `check` with values; whatever it raises that is no `EffcliError` fails."""

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def attempt(value: Any) -> None:
        try:
            check(value)
        except EffcliError as error:
            check_error(error)

    attempt()


def check_error(error: EffcliError) -> None:
    """Check that an error is told in one line, with an exit code that says what kind it is."""

    def fails() -> None:
        raise error

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert run_guarded(fails, verbose=False) == error.exit_code > 1
    check_line(said.getvalue())


def check_line(said: str) -> None:
    """Check that stderr ends in one line of reasonable length."""
    assert said.endswith("\n")
    line = said.splitlines()[-1]
    assert line.startswith("effcli: error: ")
    assert len(line) < MAX_ERROR_CHARACTERS + 100


def mutated(good: list[str], pieces: list[str]) -> st.SearchStrategy[str]:
    """Return texts that are good ones with a few places replaced."""
    changes = st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 8), st.one_of(st.sampled_from(pieces), st.text(max_size=3))),
        min_size=1,
        max_size=5,
    )

    def change(text: str, made: list[tuple[float, int, str]]) -> str:
        for where, length, piece in made:
            at = int(where * len(text))
            text = text[:at] + piece + text[at + length :]
        return text

    return st.builds(change, st.sampled_from(good), changes)


def changed_bytes(good: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return bytes of good files, cut and with some of them replaced."""

    def change(content: bytes, end: float, changes: list[tuple[float, int]]) -> bytes:
        made = bytearray(content[: max(1, int(end * len(content)))])
        for where, byte in changes:
            made[int(where * (len(made) - 1))] = byte
        return bytes(made)

    changes = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6)
    return st.builds(change, st.sampled_from(good), st.one_of(st.just(1.0), st.floats(0, 1)), changes)
