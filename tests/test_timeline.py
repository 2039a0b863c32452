"""`--timeline`: a page that works without a network, and pictures."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from effcli.errors import MissingExtraError, WriteError
from effcli.report.timeline import require_plotting, write_timeline
from tests import plans, records
from tests.pages import charts_of, rows_of

NASTY = 'org/</script><script>alert(1)</script><b>"model"'


def chart_of(page: str) -> dict[str, Any]:
    """Return the description of the one chart of a page."""
    return charts_of(page)["chart"]


def moments(chart: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that the values under the pointer come from; the last repeats the one before, where steps end."""
    *rows, end = rows_of(chart, "rect")[-1]
    assert end == {**rows[-1], "moment": len(rows)}
    return rows


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "timeline.html"
    record = plans.estimate(plans.plan(), model=records.model(NASTY))
    write_timeline(record, path)
    return path.read_text(encoding="utf-8")


def test_the_page_holds_everything_it_needs(page: str) -> None:
    before = page.partition("<script>")[0]
    assert not re.search(r"<(script|link)[^>]*(src|href)=", page)
    assert "default-src 'none'" in before
    assert not re.search(r"@import|url\(|src=|href=", before)
    assert "window.vegaEmbed" in page


def test_names_cannot_break_out_of_the_page(page: str) -> None:
    assert page.count("</script>") == page.count("<script") == 3
    assert "<b>" not in page
    assert "&lt;/script&gt;" in page


def test_every_moment_shows_its_bytes_by_category_and_their_sum(page: str) -> None:
    shown = moments(chart_of(page))
    plan = plans.plan()
    assert len(shown) == len(plan.timeline)
    for row, point in zip(shown, plan.timeline, strict=True):
        assert row["phase"] == point.phase
        assert row["optimizer state"] * plans.MIB == pytest.approx(point.optimizer_state_bytes)
        parts = ("weights", "gradients", "optimizer state", "activations", "temporaries")
        assert sum(row[part] for part in parts) == pytest.approx(row["total"])


def test_the_peak_stands_at_the_highest_moment_and_phases_have_their_bands(page: str) -> None:
    chart = chart_of(page)
    ((peak,),) = rows_of(chart, "point")
    assert peak["total"] == max(row["total"] for row in moments(chart))
    phases, updates, _ = ([row["text"] for row in rows] for rows in rows_of(chart, "text"))
    assert phases == ["forward", "backward", "step"] * 2
    assert updates == ["first update", "later updates"]
    bands, _ = rows_of(chart, "rect")
    assert bands == [{"moment": 12, "end": 24}, {"moment": 40, "end": 52}]


def test_the_page_takes_the_colour_of_its_text_from_the_reader_and_a_picture_has_its_own(
    page: str, tmp_path: Path
) -> None:
    assert chart_of(page)["config"]["axis"]["labelColor"] == "currentColor"
    assert "prefers-color-scheme: dark" in page
    write_timeline(plans.estimate(plans.plan()), tmp_path / "timeline.svg")
    picture = (tmp_path / "timeline.svg").read_text()
    assert "currentColor" not in picture
    assert "distilbert-base-cased with adamw" in picture


def test_a_picture_is_written_and_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    write_timeline(plans.estimate(plans.plan(timeline=plans.timeline(accum=3))), tmp_path / "new" / "timeline.PNG")
    assert (tmp_path / "new" / "timeline.PNG").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"could not write '.*file/timeline\.svg'"):
        write_timeline(plans.estimate(plans.plan()), tmp_path / "file" / "timeline.svg")


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_a_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"--timeline a\.html .* pip install 'effcli\[plot\]'"):
        require_plotting("a.html")
