"""Which of the driver's cards a name stands for, and which cards CUDA_VISIBLE_DEVICES shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effcli.nvml.answers import CardIdentity
from effcli.nvml.names import matching
from effcli.nvml.session import NvmlSession, NvmlUnavailableError, cards, find_card
from effcli.nvml.visible import check_listing, read_listing
from tests.nvml.standin import Driver

# CUDA would count the H100 first, the driver counts it last. Two identifiers begin alike.
H100 = "GPU-aaaa3333-3333-3333-3333-333333333333"
A100 = "GPU-aaaa2222-2222-2222-2222-222222222222"
T4 = "GPU-bbbb1111-1111-1111-1111-111111111111"
SMALL = "MIG-cccc0001-0001-0001-0001-000000000001"
LARGE = "MIG-cccc0002-0002-0002-0002-000000000002"
OLDER = "MIG-GPU-aaaa2222-2222-2222-2222-222222222222/5/0"
THREE = f"""
    card {T4} Tesla T4
    memory 100 1
    card {A100} NVIDIA A100-SXM4-40GB
    mig off
    memory 200 2
    card {H100} NVIDIA H100 80GB HBM3
    memory 300 3
"""
DIVIDED = f"""
    card {T4} Tesla T4
    card {A100} NVIDIA A100-SXM4-40GB
    mig on
    instance {SMALL} 7 0 0
    instance {LARGE} 5 0 4
"""


def found(*names: str) -> str:
    """Return the identifier of the card for these names, or the reason why there is none."""
    with NvmlSession.open() as session:
        try:
            return find_card(session, names).identity.uuid
        except NvmlUnavailableError as error:
            return error.reason


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([H100], H100),
        ([A100], A100),
        (["GPU-b"], T4),
        (["GPU-aaaa2"], A100),
        (["GPU-dddd", "GPU-aaaa3"], H100),
        (["MIG-x", H100, T4], H100),
        (["", "0", "aaaa3333", T4], T4),
    ],
)
def test_a_card_is_found_by_identifier_prefix_or_the_next_name(names: list[str], expected: str, driver: Driver) -> None:
    driver.play(THREE)
    assert found(*names) == expected


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["GPU-aaaa"], [A100, H100, "more than one"]),
        (["GPU-"], [T4, A100]),
        (["GPU-dddd"], ["'GPU-dddd'", "does not know", T4, H100]),
        (["2"], ["'2'", "does not know"]),
        ([], ["without a name"]),
        (["GPU-\x1b[31m" + 300 * "x"], ["?[31m", "..."]),
        (["GPU-\udc80"], ["could not be asked"]),
    ],
)
def test_a_name_without_a_card_or_with_several_is_a_reason(names: list[str], words: list[str], driver: Driver) -> None:
    driver.play(THREE)
    reason = found(*names)
    assert all(word in reason for word in words)
    assert reason.isprintable() or "\udc80" in names[0]
    assert len(reason) < 400


def test_without_cards_the_reason_says_so(driver: Driver) -> None:
    driver.play("driver 570.1")
    assert "it has none" in found(T4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (SMALL, SMALL),
        (LARGE, LARGE),
        ("MIG-cccc0002", LARGE),
        (OLDER, LARGE),
        (OLDER.replace("/5/", "/7/"), SMALL),
        (T4, T4),
        (A100, A100),  # which of the two is in use is not known
    ],
)
def test_an_instance_is_found_by_either_form_of_its_name(name: str, expected: str, driver: Driver) -> None:
    driver.play(DIVIDED)
    assert found(name) == expected


@pytest.mark.parametrize("name", ["MIG-cccc", "MIG-", OLDER.replace("/5/", "/6/"), OLDER.replace("aaaa", "bbbb")])
def test_a_name_of_no_or_several_instances_is_a_reason(name: str, driver: Driver) -> None:
    driver.play(DIVIDED)
    assert "more than one" in found(name) or "does not know" in found(name)


def test_the_only_instance_stands_for_its_card(driver: Driver) -> None:
    driver.play(f"card {A100} NVIDIA A100\nmig on\ninstance {LARGE} 5 0 2\ncard {T4} Tesla T4")
    assert (found(A100), found(T4)) == (LARGE, T4)


def test_an_older_driver_lists_older_names(driver: Driver) -> None:
    driver.play(
        f"card {A100} NVIDIA A100\nmig on\ninstance {OLDER} 5 0 0\ninstance {OLDER.replace('/5/', '/7/')} 7 0 1"
    )
    assert (found(OLDER), found("MIG-GPU-aaaa2222-2222-2222-2222-222222222222/7")) == (
        OLDER,
        OLDER.replace("/5/", "/7/"),
    )


def test_an_instance_that_is_not_listed_is_found_by_its_whole_name(driver: Driver) -> None:
    driver.play(DIVIDED + "\nfail nvmlDeviceGetMigMode 4")
    assert found(LARGE) == LARGE


@pytest.mark.parametrize("function", ["nvmlDeviceGetUUID", "nvmlDeviceGetHandleByIndex", "*"])
def test_a_card_that_cannot_be_opened_hides_no_other(function: str, driver: Driver) -> None:
    driver.play(THREE + f"\nfail {function} 15 on {A100}")
    with NvmlSession.open() as session:
        known = cards(session)
    assert [card.uuid for card in known] == [T4, "", H100]
    assert [card.index for card in known] == [0, 1, 2]
    assert "lost" in str(known[1].unreadable)
    assert found(H100) == H100
    assert ("lost" in found(A100)) == (function == "*")  # else the driver finds it by its identifier


def test_the_count_of_cards_may_be_refused(driver: Driver) -> None:
    driver.play(THREE + "\nfail nvmlDeviceGetCount 999")
    with NvmlSession.open() as session, pytest.raises(NvmlUnavailableError, match="unknown"):
        cards(session)


# --- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------------------------------


def identities(script: str, driver: Driver) -> tuple[CardIdentity, ...]:
    driver.play(script)
    with NvmlSession.open() as session:
        return cards(session)


def shown(text: str, known: Sequence[CardIdentity]) -> list[str]:
    """Return the identifiers of the cards that are left of a list."""
    by_number = {str(card.index): card.uuid for card in known if card.index is not None}
    entries = check_listing(read_listing(text), known).entries
    return [by_number[entry] if entry in by_number else matching(entry, known)[0].uuid for entry in entries]


SHOWN = [
    ("", []),
    ("-1", []),
    ("0", [T4]),
    ("2,0", [H100, T4]),
    (" 2 , 1", [H100, A100]),
    ("0,2,-1,1", [T4, H100]),
    ("2,7,0", [H100]),
    ("7", []),
    ("1,1", []),
    ("2,+0,-0", []),
    ("1gpu2,2ampere", [A100, H100]),
    ("one,2", []),
    ("2,two", [H100]),
    ("1,GPU-bbbb", [A100]),
    (H100, [H100]),
    (f"{H100},{T4}", [H100, T4]),
    ("GPU-b,GPU-aaaa2", [T4, A100]),
    ("GPU-b,GPU-aaaa,GPU-aaaa2", [T4]),  # the second stands for two
    ("GPU-dddd,GPU-b", []),
    ("GPU-b,0", [T4]),
    ("GPU-b,GPU-bbbb", []),
    ("GPU-b,MIG-cccc", [T4]),
    ("NoDevFiles", []),
]
"""Texts and what CUDA's programming guide says of them: any entry that is no device ends the list."""


@pytest.mark.parametrize(("text", "expected"), SHOWN)
def test_the_cards_that_are_shown_are_those_of_the_guide(text: str, expected: list[str], driver: Driver) -> None:
    assert shown(text, identities(THREE, driver)) == expected


def as_torch_has_it(text: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    listed: list[Any] = torch.cuda._parse_visible_devices()
    known = [T4, A100, H100]
    if listed and isinstance(listed[0], str):
        listed = torch.cuda._transform_uuid_to_ordinals(listed, known)
    valid = next((place for place, index in enumerate(listed) if index >= len(known)), len(listed))
    return [known[index] for index in listed[:valid]]


@pytest.mark.parametrize(("text", "expected"), SHOWN)
def test_torch_reads_the_variable_likewise(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_torch_has_it(text, monkeypatch) == expected


ENTRY = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "3",
        "-1",
        " 1",
        "2 ",
        "+1",
        "00",
        "1x",
        "x",
        "",
        T4,
        A100,
        H100,
        "GPU-b",
        "GPU-aaaa",
        "GPU-z",
        " GPU-b",
    ]
)


@given(st.lists(ENTRY, max_size=5).map(",".join))
def test_torch_reads_any_list_likewise(text: str) -> None:
    known = [CardIdentity(uuid=uuid, name="a card", index=index) for index, uuid in enumerate((T4, A100, H100))]
    with pytest.MonkeyPatch.context() as patch:
        expected = as_torch_has_it(text, patch)
    assert shown(text, known) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,-1,1", "'-1'"),
        ("0,7", "'7', which is no device here"),
        ("GPU-b,GPU-aaaa", A100),
        ("0,0", "'0' is named twice"),
        ("GPU-b,GPU-bb", f"'{T4}' is named twice"),
        ("0,\x1b[2J", "'?[2J'"),
    ],
)
def test_why_the_list_ends_is_told(text: str, words: str, driver: Driver) -> None:
    listing = check_listing(read_listing(text), identities(THREE, driver))
    assert words in str(listing.stopped)


def test_a_list_of_which_nothing_is_left_out_has_no_reason(driver: Driver) -> None:
    assert check_listing(read_listing("2,0"), identities(THREE, driver)).stopped is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [(SMALL, [SMALL]), ("MIG-cccc0002", [LARGE]), (OLDER, [LARGE]), (T4, [T4]), ("MIG-cccc", []), ("MIG-dddd", [])],
)
def test_instances_are_shown_by_name(text: str, expected: list[str], driver: Driver) -> None:
    assert shown(text, identities(DIVIDED, driver)) == expected


@pytest.mark.parametrize("text", ["0", H100])
def test_no_cards_show_nothing(text: str) -> None:
    assert shown(text, ()) == []


def test_a_list_names_other_cards_than_one_that_cannot_be_opened(driver: Driver) -> None:
    known = identities(THREE + f"\nfail nvmlDeviceGetUUID 15 on {T4}", driver)
    assert shown(H100, known) == [H100]
