"""`compare.html` in a real browser: charts are drawn, tables sort, nothing is asked for, and nothing hostile runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from effcli.report.page import write_page
from effcli.report.timeline import write_timeline
from tests import comparisons, cuda_records, plans
from tests.browser import NAMES, Tab, chromium, tab

pytestmark = pytest.mark.skipif(chromium() is None, reason=f"no browser here: none of {', '.join(NAMES)}")

ODD = {"\x1b": r"\x1b", "\r": " ", "\n": " ", "\u2028": " "}
SHOWN = ["".join(ODD.get(character, character) for character in text) for text in comparisons.HOSTILE_TEXTS]
MARKS = """(key) => [...document.querySelectorAll(`#${key} svg .role-mark`)].map((group) =>
    [/mark-(\\w+)/.exec(group.getAttribute('class'))[1], group.children.length])"""
COLUMN = "[...document.querySelectorAll('table.sortable tbody tr')].map((row) => row.cells[0].textContent)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    with tab() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the pages, written once."""
    folder = tmp_path_factory.mktemp("pages")
    records = {
        "three": comparisons.three(),
        "two_seeds": comparisons.two_seeds(),
        "planned": comparisons.planned_only(),
        "hostile": comparisons.hostile(),
        "cuda": cuda_records.every_kind(),
    }
    for name, record in records.items():
        write_page(record, folder / f"{name}.html")
    write_timeline(plans.estimate(plans.plan()), folder / "timeline.html")
    return {path.stem: path for path in folder.iterdir()}


@pytest.fixture
def three(browser: Tab, pages: dict[str, Path]) -> Tab:
    """Return the browser, wide and light, with the page of three optimizers."""
    browser.open(pages["three"])
    browser.view(1280)
    return browser


def quiet(browser: Tab, path: Path) -> bool:
    """Return whether all charts are drawn, the console is empty and nothing but the page was asked for."""
    assert browser.ask("document.documentElement.dataset.charts") == "drawn"
    assert browser.said == []
    assert browser.requests == [path.as_uri()]
    return True


def marks(browser: Tab, chart: str) -> dict[str, list[int]]:
    """Return how many marks each layer of a chart shows, by their kind; a line or an area is a layer of its own."""
    drawn: dict[str, list[int]] = {}
    for kind, number in browser.ask(f"({MARKS})({chart!r})"):
        drawn.setdefault(kind, []).append(number)
    return drawn


@pytest.mark.parametrize("name", ["three", "two_seeds", "planned", "cuda", "timeline"])
def test_every_page_is_drawn_in_silence(name: str, browser: Tab, pages: dict[str, Path]) -> None:
    browser.open(pages[name])
    assert quiet(browser, pages[name])
    drawn = browser.ask("document.querySelectorAll('.chart svg.marks').length")
    assert drawn == {"three": 7, "two_seeds": 7, "planned": 5, "cuda": 3, "timeline": 1}[name]


def test_charts_show_each_number_of_the_record(three: Tab) -> None:
    # Weights, state, gradients, temporaries or rest, predicted and measured; names, and totals.
    assert marks(three, "memory") == {"rect": [3 * 4 * 2], "text": [3, 6]}
    losses = marks(three, "loss-updates")
    assert losses["line"] == [1] * 6  # raw and mean
    assert losses["symbol"] == [9, 3 * comparisons.UPDATES]  # evaluations, and what the pointer finds of means
    assert marks(three, "loss-time") == losses
    assert marks(three, "tradeoff")["symbol"] == [3]
    for place, run in enumerate(comparisons.three().runs):
        assert run.optimizer.plan
        live = marks(three, f"live-n{place}")
        assert live["area"] == [1] * 5
        assert live["rule"] == live["symbol"] == [1]
        assert live["rect"] == [2, len(run.optimizer.plan.timeline) + 1]


def test_bars_are_as_long_as_their_bytes(three: Tab) -> None:
    boxes = three.ask(
        "[...document.querySelectorAll('#memory svg .mark-rect.role-mark path')].map((bar) => bar.getBBox().width)"
    )
    (adamw, *_) = comparisons.three().runs
    assert adamw.measured
    ratio = adamw.optimizer.state_bytes / adamw.model.weights_bytes
    assert boxes[1] / boxes[0] == pytest.approx(ratio, rel=1e-3)


def test_charts_tell_screen_readers_their_numbers(three: Tab) -> None:
    labels = three.ask("[...document.querySelectorAll('.chart')].map((chart) => chart.getAttribute('aria-label'))")
    assert len(labels) == 7
    assert any("adam8bit: predicted 799.60 MiB, measured 799.61 MiB" in label for label in labels)
    assert all(labels)


def test_the_table_sorts_by_click_and_by_key(three: Tab) -> None:
    asked = three.ask(COLUMN)
    assert asked == ["adamw", "adafactor", "adam8bit"]
    head = "document.querySelectorAll('table.sortable th button')[3]"
    three.ask(f"{head}.click()")
    assert three.ask(COLUMN) == ["adafactor", "adam8bit", "adamw"]
    assert three.ask(f"{head}.closest('th').getAttribute('aria-sort')") == "ascending"
    three.ask(f"{head}.focus()")
    for kind in ("keyDown", "keyUp"):
        three.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13)
    assert three.ask(COLUMN) == ["adamw", "adam8bit", "adafactor"]
    assert three.ask(f"{head}.closest('th').getAttribute('aria-sort')") == "descending"
    three.ask("document.querySelectorAll('table.sortable th button')[0].click()")
    assert three.ask(COLUMN) == ["adafactor", "adam8bit", "adamw"]
    assert three.ask("document.querySelectorAll('[aria-sort]').length") == 1
    three.ask(f"{head}.click(); {head}.click(); {head}.click()")
    assert three.ask(COLUMN) == asked


def test_what_was_not_measured_stays_last_whichever_way_the_table_is_sorted(browser: Tab, tmp_path: Path) -> None:
    write_page(comparisons.one_failed(), tmp_path / "failed.html")
    browser.open(tmp_path / "failed.html")
    head = "document.querySelectorAll('table.sortable th button')[3]"
    for ends in (["adam8bit", "adamw"], ["adamw", "adam8bit"]):
        browser.ask(f"{head}.click()")
        assert browser.ask(COLUMN) == [*ends, "adafactor", "lion8bit"]


def test_nothing_hostile_runs_and_every_name_is_shown_as_it_is(browser: Tab, pages: dict[str, Path]) -> None:
    browser.view(1280)
    browser.open(pages["hostile"])
    assert quiet(browser, pages["hostile"])
    assert browser.ask(COLUMN) == SHOWN
    assert browser.ask("document.querySelectorAll('.chart svg.marks').length") == 4 + len(SHOWN)
    headings = browser.ask("[...document.querySelectorAll('#memory svg text')].map((text) => text.textContent)")
    short = [name if len(name) <= 40 else f"{name[:37]}..." for name in SHOWN]
    assert [text for text in headings if text in short] == short
    middle = browser.ask(
        "(() => { const box = document.querySelector('#memory svg .mark-rect.role-mark path').getBoundingClientRect();"
        " scrollBy(0, box.y - 200); return [box.x + box.width / 2, 200 + box.height / 2]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=middle[0], y=middle[1])
    browser.settle("Boolean(document.querySelector('#vg-tooltip-element.visible'))")
    assert SHOWN[0] in browser.ask("document.querySelector('#vg-tooltip-element').textContent")
    assert browser.ask("window.attacked") is None
    assert browser.ask("document.querySelectorAll('img, svg[onload], iframe').length") == 0
    assert browser.ask("Object.prototype.x === undefined && !('optimizer' in {})")


def test_the_policy_of_the_page_stops_a_script_that_gets_in(browser: Tab, pages: dict[str, Path]) -> None:
    browser.open(pages["planned"])
    browser.ask(
        "(() => { const script = document.createElement('script'); script.textContent = 'window.attacked = 1';"
        " document.body.append(script); })()"
    )
    assert browser.ask("window.attacked") is None
    assert any("Content Security Policy" in line for line in browser.said)


def test_what_runs_took_of_the_device_fits_the_page(browser: Tab, pages: dict[str, Path]) -> None:
    browser.view(1280)
    browser.open(pages["cuda"])
    browser.ask("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    widths = browser.ask(
        "[...document.querySelectorAll('.scroll')].map((box) => [box.ariaLabel, box.scrollWidth - box.clientWidth])"
    )
    assert {"The comparison", "On the device", "Most allocated in each phase"} <= {name for name, _ in widths}
    assert [name for name, beyond in widths if beyond > 0] == []
    cells = browser.ask(
        "[...document.querySelectorAll('[aria-label=\"On the device\"] td')].map((td) => td.textContent)"
    )
    assert "574.00 MiB" in cells
    assert "n/a" in cells


@pytest.mark.parametrize("name", ["two_seeds", "hostile", "cuda"])
def test_a_phone_scrolls_tables_and_not_the_page(name: str, browser: Tab, pages: dict[str, Path]) -> None:
    browser.view(1280)
    browser.open(pages[name])
    wide = browser.ask("document.querySelector('#memory svg').getBoundingClientRect().width")
    browser.view(390)
    assert browser.ask("document.documentElement.scrollWidth") == 390
    assert browser.ask("document.querySelector('#memory svg').getBoundingClientRect().width") <= 390 < wide
    scroll = browser.ask(
        "(() => { const box = document.querySelector('.scroll'); box.scrollLeft = 200;"
        " const [first, around] = [box.querySelector('tbody th'), box].map((one) => one.getBoundingClientRect().x);"
        " return [box.scrollLeft, first - around]; })()"
    )
    assert scroll[0] == 200
    assert abs(scroll[1]) <= 2  # the first column stays


def test_charts_take_the_colours_of_light_and_dark(three: Tab) -> None:
    colours = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
        " getComputedStyle(document.querySelector('#memory svg .role-axis-label text')).fill]"
    )
    brightness = {}
    for scheme in ("light", "dark"):
        three.view(1280, scheme=scheme)
        paper, ink, label = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in three.ask(colours))
        assert label == ink
        assert abs(paper - ink) > 400
        brightness[scheme] = paper
    assert brightness["dark"] < 150 < brightness["light"]


def test_on_paper_the_page_is_light_open_and_not_cut_off(three: Tab) -> None:
    three.view(1000, scheme="dark", media="print")
    assert three.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert three.ask("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    three.ask("dispatchEvent(new Event('beforeprint'))")
    assert three.ask("document.querySelectorAll('details:not([open])').length") == 0
    assert three.ask("document.documentElement.scrollWidth") <= 1000
    three.ask("dispatchEvent(new Event('afterprint'))")
    assert three.ask("document.querySelectorAll('details[open]').length") == 0
    three.view(1280)
    assert three.pdf().startswith(b"%PDF")
