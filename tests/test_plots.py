"""`--plot`: the picture of a comparison."""

from __future__ import annotations

import struct
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from effcli.errors import WriteError
from effcli.measure.comparison_record import Attempt, ComparisonRecord, compared
from effcli.report.plots import write_plot
from tests import comparisons


def picture_of(record: ComparisonRecord, folder: Path) -> tuple[ET.Element, list[str]]:
    """Return the picture as SVG, and all texts in it."""
    write_plot(record, folder / "plot.svg")
    picture = ET.fromstring((folder / "plot.svg").read_text(encoding="utf-8"))
    return picture, [text for element in picture.iter() if (text := (element.text or "").strip())]


def test_the_picture_holds_memory_losses_and_the_tradeoff_and_its_own_colours(tmp_path: Path) -> None:
    picture, texts = picture_of(comparisons.three(), tmp_path)
    assert any(text.startswith("Of adamw's 501.89 MiB of optimizer state") for text in texts)
    assert {"Memory at the peak", "Training loss", "Number of statistics and their precision"} <= set(texts)
    # A heading of bars, an entry of the legend of lines, a label of a point.
    assert [texts.count(name) for name in comparisons.KINDS] == [3, 3, 3]
    assert {"1,254.73 MiB", "672.49 MiB", "799.61 MiB"} <= set(texts)
    assert "currentColor" not in ET.tostring(picture, encoding="unicode")


def test_a_plan_alone_has_no_losses_to_draw(tmp_path: Path) -> None:
    _, texts = picture_of(comparisons.planned_only(), tmp_path)
    assert "Memory at the peak" in texts
    assert "Training loss" not in texts


def test_hostile_names_stay_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture, texts = picture_of(comparisons.hostile(), tmp_path)
    assert comparisons.HOSTILE_NAME in texts
    for name in ("__proto__", "constructor", "a.b[0]"):
        assert texts.count(name) >= 2  # a heading of bars and an entry of the legend of lines
    assert capfd.readouterr().err == ""  # where errors of the charts' library go
    tags = {element.tag.rpartition("}")[2] for element in picture.iter()}
    assert tags <= {"svg", "g", "rect", "path", "line", "text", "defs", "clipPath"}


def test_a_png_is_wide_enough_to_read(tmp_path: Path) -> None:
    write_plot(comparisons.two_seeds(), tmp_path / "new" / "plot.PNG")
    content = (tmp_path / "new" / "plot.PNG").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 2 * 1200
    assert height < width


def test_a_comparison_without_any_record_is_a_headline(tmp_path: Path) -> None:
    nothing = compared([Attempt(name="adamw", seed=1, status="missing")], [], status="interrupted")
    _, texts = picture_of(nothing, tmp_path)
    assert texts == ["No optimizer of this comparison left a number.", "No run left a record."]


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"could not write '.*file/plot\.svg'"):
        write_plot(comparisons.planned_only(), tmp_path / "file" / "plot.svg")
