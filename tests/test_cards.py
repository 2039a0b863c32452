"""Cards by the names that people write, and amounts of memory with their units."""

from __future__ import annotations

import re

import pytest

from effcli.errors import UsageError
from effcli.memory.cards import CONTEXT_BYTES, cards, find_card, matching_cards, parse_budget

GIB = 1024**3
UNITS = {"GiB": GIB, "MiB": 1024**2, "B": 1}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("rtx-4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        (" 4090 ", "rtx-4090"),
        ("4090 laptop", "rtx-4090-laptop"),
        ("4090 mobile", "rtx-4090-laptop"),
        ("a100-80gb", "a100-80gb"),
        ("A100 80GB", "a100-80gb"),
        ("a100-80g", "a100-80gb"),
        ("A100 40GiB", "a100-40gb"),
        ("4060 Ti 16GB", "rtx-4060-ti-16gb"),
        ("a6000", "rtx-a6000"),
        ("6000 Ada", "rtx-6000-ada"),
        ("titan rtx", "titan-rtx"),
        ("3060 12gb", "rtx-3060"),
        # as torch.cuda.get_device_name() prints them
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "rtx-3060-laptop"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100S-PCIE-32GB", "v100-32gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
    ],
)
def test_a_card_is_found_under_the_names_that_people_and_torch_give_it(text: str, key: str) -> None:
    assert find_card(text).key == key
    assert parse_budget(text).card == find_card(text)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("A100", "a100-40gb or a100-80gb"),
        ("Tesla V100", "v100-16gb or v100-32gb"),
        ("h100", "h100-pcie, h100-sxm or h100-nvl"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx-4060-ti-8gb or rtx-4060-ti-16gb"),
        ("3080", "rtx-3080-10gb or rtx-3080-12gb"),
        ("RTX 6000", "quadro-rtx-6000 or rtx-6000-ada"),
    ],
)
def test_a_name_of_several_cards_is_refused_with_what_to_write(text: str, keys: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_budget(text)
    assert str(raised.value) == f"several cards are called '{text}'; write {keys}"


def test_an_unknown_card_is_refused_with_the_nearest_ones_and_the_way_to_list_all() -> None:
    with pytest.raises(
        UsageError, match=r"no card 'rtx-4091' is known\. Did you mean rtx-4090, .* or .*`effcli gpus` lists all"
    ) as raised:
        parse_budget("rtx-4091")
    assert "\n" not in str(raised.value)


def test_nonsense_is_refused_without_a_guess() -> None:
    with pytest.raises(UsageError, match=r"no card '\?' is known\. .* or write an amount such as 24GiB"):
        parse_budget("?")


def test_cards_are_found_by_a_part_of_their_name_and_a_wrong_one_is_answered_as_ever() -> None:
    assert matching_cards(None) == cards()
    assert {card.key for card in matching_cards("A100")} == {card.key for card in cards() if "a100" in card.key}
    with pytest.raises(UsageError, match=r"no card 'rtx-4091' is known\. Did you mean rtx-4090"):
        matching_cards("rtx-4091")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("16GiB", 17_179_869_184),
        ("16 gib", 17_179_869_184),
        (" 16GB ", 16_000_000_000),
        ("16gb", 16_000_000_000),
        ("24576MiB", 25_769_803_776),
        ("24576 MB", 24_576_000_000),
        ("23.5GiB", 25_232_932_864),
        ("0.1GB", 100_000_000),
        ("1TiB", 1_099_511_627_776),
        ("17179869184B", 17_179_869_184),
    ],
)
def test_an_amount_is_binary_with_an_i_and_decimal_without(text: str, num_bytes: int) -> None:
    budget = parse_budget(text)
    assert (budget.num_bytes, budget.card) == (num_bytes, None)


@pytest.mark.parametrize("text", ["16", "16g", "24 gigs", "16384", "16 %", "-16GiB", "1,5GiB", "0GiB", "", "GiB"])
def test_an_amount_without_a_clear_unit_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"GiB") as raised:
        parse_budget(text)
    assert "\n" not in str(raised.value)


def test_an_amount_without_a_unit_says_both_that_could_be_meant() -> None:
    with pytest.raises(UsageError, match=r"write 24GiB \(1024\^3 bytes each\) or 24GB \(1000\^3\)"):
        parse_budget("24g")


def test_a_card_gives_what_a_process_can_use_and_not_what_is_sold() -> None:
    budget = parse_budget("rtx-6000-ada")
    assert budget.num_bytes == 50_865_307_648 < 48 * GIB


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.key)
def test_every_card_says_where_its_usable_bytes_are_from_or_has_what_is_sold(card) -> None:
    assert (card.reading is None) == (card.source is None)
    if card.reading is None:
        assert card.usable_bytes == card.nominal_bytes
        return
    amount, unit = re.match(r"([\d.]+) (\w+) in (?:CUDA|nvidia-smi)", card.reading).groups()
    assert card.usable_bytes == round(float(amount) * 100) * UNITS[unit] // 100
    assert 0.9 * card.nominal_bytes < card.usable_bytes < card.nominal_bytes


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.key)
def test_every_card_is_found_by_its_own_key(card) -> None:
    assert find_card(card.key) == card


def test_architectures_have_the_capabilities_that_cuda_gives_them() -> None:
    expected = {"p100": (6, 0), "v100-16gb": (7, 0), "t4": (7, 5), "a100-40gb": (8, 0), "rtx-3090": (8, 6)}
    expected |= {"rtx-4090": (8, 9), "h100-sxm": (9, 0), "b200": (10, 0), "rtx-5090": (12, 0)}
    assert {key: find_card(key).capability for key in expected} == expected


def test_the_context_is_a_part_of_every_card_that_leaves_room() -> None:
    assert 400 * 1024**2 < CONTEXT_BYTES < min(card.usable_bytes for card in cards()) / 4
