"""Promises of what suite `desktop` reads to judge: OpenDocument files, pictures, widgets.

No desktop is started here; where the packages of the suite are missing, these tests are skipped.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from envs.suites.desktop.suite import PYTHON_PACKAGES, DesktopSuite

if any(importlib.util.find_spec(package) is None for package in PYTHON_PACKAGES):
    pytest.skip("needs pip install -e '.[desktop]'", allow_module_level=True)

from envs.suites.desktop import host_resources
from envs.suites.desktop import suite as needs
from envs.suites.desktop.files import make_document, make_picture, make_slides, make_spreadsheet
from envs.suites.desktop.getters import METRICS, GetterContext, get, read_cells, read_paragraphs

_SPACES = " ".join(
    f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
    for name in ("office", "text", "table")
)


def odf(path: Path, kind: str, content: str) -> Path:
    """An OpenDocument file of a kind (text, spreadsheet)."""
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(
            "content.xml",
            f"<office:document-content {_SPACES}><office:body><office:{kind}>{content}"
            f"</office:{kind}></office:body></office:document-content>",
        )
    return path


def scene(home: Path, widgets: list[dict[str, Any]] | None = None) -> GetterContext:
    return GetterContext(home, lambda: None, None, lambda: widgets or [])


# --- OpenDocument -----------------------------------------------------------------------------


def test_paragraphs_of_a_document_read_as_displayed(tmp_path: Path) -> None:
    path = odf(
        tmp_path / "a.odt",
        "text",
        "<text:tracked-changes><text:p>was there</text:p></text:tracked-changes>"
        '<text:h>Title</text:h><text:p>a<text:s text:c="3"/>b<text:tab/><text:span>c'
        "<text:line-break/></text:span>d<text:note><text:p>aside</text:p></text:note>.</text:p>"
        "<text:list><text:list-item><text:p>one</text:p></text:list-item></text:list><text:p/>",
    )
    assert read_paragraphs(path) == ["Title", "a   b\tc\nd.", "aside", "one", ""]


def test_cells_of_a_sheet_are_found_after_repeated_ones(tmp_path: Path) -> None:
    blank = '<table:table-cell table:number-columns-repeated="2"/>'
    number = '<table:table-cell office:value-type="float" office:value="5"/>'
    formula = (
        '<table:table-cell table:formula="of:=SUM([.A1:.A2])" office:value-type="float" '
        'office:value="7.5"><text:p>7,50</text:p></table:table-cell>'
    )
    text = '<table:table-cell office:value-type="string"><text:p>tea</text:p></table:table-cell>'
    truth = '<table:table-cell office:value-type="boolean" office:boolean-value="true"/>'
    path = odf(
        tmp_path / "a.ods",
        "spreadsheet",
        '<table:table table:name="One"><table:table-row table:number-rows-repeated="2">'
        f"{blank}{number}</table:table-row><table:table-row>{formula}{text}{truth}"
        '</table:table-row></table:table><table:table table:name="Two"/>',
    )
    names = ["A1", "C1", "C2", "A3", "B3", "C3", "D3", "A4"]
    values = [None, 5.0, 5.0, 7.5, "tea", True, None, None]
    assert read_cells(path, names, formulas=False) == values
    assert read_cells(path, ["A3", "C1"], "One", formulas=True) == ["=SUM([.A1:.A2])", 5.0]
    assert read_cells(path, ["A3"], "Two", formulas=False) == [None]


def test_a_file_that_is_not_opendocument_is_a_fail_of_the_policy(tmp_path: Path) -> None:
    (tmp_path / "text.odt").write_text("plain")
    odf(tmp_path / "sheet.odt", "spreadsheet", "")
    odf(tmp_path / "broken.odt", "text", "<text:p>")
    odf(tmp_path / "empty.ods", "spreadsheet", "")
    for name in ("none.odt", "text.odt", "sheet.odt", "broken.odt"):
        assert get(scene(tmp_path), "paragraphs", {"path": name}) is None, name
    for cell, sheet in (("A1", ""), ("A1", "Sheet1")):
        told = {"path": "empty.ods", "cells": [cell], "sheet": sheet}
        assert get(scene(tmp_path), "cells", told) is None, told


@pytest.mark.parametrize(
    ("getter", "name", "more"),
    [
        ("cells", "a.xlsx", {"cells": ["A1"]}),
        ("paragraphs", "a.docx", {}),
        ("slides", "a.pptx", {}),
        ("paragraphs", "a.odt", {}),
        ("cells", "a.ods", {"cells": ["A1"]}),
    ],
)
def test_a_damaged_file_never_breaks_the_evaluator(
    tmp_path: Path, getter: str, name: str, more: dict[str, Any]
) -> None:
    make_spreadsheet(tmp_path, "a.xlsx", {"Sheet1": [["Item", 1]]})
    make_document(tmp_path, "a.docx", ["text"])
    make_slides(tmp_path, "a.pptx", [{"title": "text"}])
    odf(tmp_path / "a.odt", "text", "<text:p>text</text:p>")
    odf(tmp_path / "a.ods", "spreadsheet", '<table:table table:name="Sheet1"/>')
    told = {"path": name, **more}
    assert get(scene(tmp_path), getter, told)
    whole = (tmp_path / name).read_bytes()
    rng = Random(name)
    for _ in range(40):
        at, count = rng.randrange(len(whole)), rng.randrange(1, 64)
        damaged = whole[:at] + rng.randbytes(count) + whole[at + count :]
        (tmp_path / name).write_bytes(damaged if rng.random() < 0.7 else whole[:at])
        get(scene(tmp_path), getter, told)


# --- pictures ---------------------------------------------------------------------------------


def test_a_picture_is_read_by_shares_of_its_size(tmp_path: Path) -> None:
    red, blue = [200, 40, 40], [40, 80, 200]
    make_picture(tmp_path, "a.png", [64, 48], [([0, 0, 32, 48], red), ([32, 0, 64, 24], blue)])
    with Image.open(tmp_path / "a.png") as picture:
        picture.resize((32, 24)).save(tmp_path / "a.jpg", quality=95)
    corners = [[0.25, 0.25], [0.75, 0.25], [0.75, 0.75]]
    for name, kind, width, height in (("a.png", "PNG", 64, 48), ("a.jpg", "JPEG", 32, 24)):
        told = get(scene(tmp_path), "picture", {"path": name})
        assert told == {"format": kind, "width": width, "height": height}
        colours = get(scene(tmp_path), "pixels", {"path": name, "at": corners})
        assert METRICS["near"](colours, [red, blue, [255, 255, 255]], tolerance=8)
    (tmp_path / "b.png").write_text("no picture")
    for name in ("b.png", "none.png"):
        assert get(scene(tmp_path), "picture", {"path": name}) is None
        assert get(scene(tmp_path), "pixels", {"path": name, "at": corners}) is None


# --- folders ---------------------------------------------------------------------------------


def test_an_environment_keeps_its_number_while_others_start_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host_resources, "_numbers_in_use", set())
    numbers = [host_resources.DesktopNumber() for _ in range(4)]

    def sit(desktop_number: host_resources.DesktopNumber) -> str:
        """The name of a desktop's folder, once the desktop was made and removed."""
        folder, lock = desktop_number.make_folder()
        os.close(lock)
        shutil.rmtree(folder)
        return folder.name.removeprefix(host_resources.FOLDER_PREFIX)

    first, second, third, fourth = numbers
    assert [sit(first), sit(second), sit(first), sit(third), sit(second)] == list("01021")
    (tmp_path / f"{host_resources.FOLDER_PREFIX}1").mkdir()  # another process was faster
    assert [sit(second), sit(second), sit(first)] == list("330")
    first.leave()
    first.leave()
    assert [sit(fourth), sit(third), sit(first)] == list("024")


# --- widgets and parts ------------------------------------------------------------------------


def test_widgets_are_matched_by_the_given_fields(tmp_path: Path) -> None:
    widgets = [
        {"role": "text", "name": "", "text": "105", "checked": False},
        {"role": "radio menu item", "name": "Octal", "text": "", "checked": True},
    ]
    items = get(scene(tmp_path, widgets), "accessibility_tree", {"role": "radio menu item"})
    assert items == widgets[1:]
    holds = METRICS["includes_items"]
    assert holds(items, [{"name": "Octal", "checked": True}])
    assert not holds(items, [{"name": "Octal", "checked": False}])
    assert not holds(items, [{"name": "Octal"}, {"text": "105"}])
    assert not holds(None, [])


def test_tasks_whose_optional_parts_are_missing_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(needs, "has_accessibility", lambda: False)
    with caplog.at_level("INFO"):
        suite = DesktopSuite()
    left = set(suite.tasks)
    assert "desktop/mousepad-save-as" in left
    assert left.isdisjoint({"desktop/gimp-flip", "desktop/galculator-display"})
    assert "gimp-flip" in caplog.text
    assert "apt install at-spi2-core python3-gi gir1.2-atspi-2.0 gimp" in caplog.text


def test_a_folder_made_again_during_the_check_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"{host_resources.FOLDER_PREFIX}1"

    def make() -> None:
        folder.mkdir()
        (folder / host_resources._LOCK).touch()

    def made_again(lock: int, operation: int) -> None:
        shutil.rmtree(folder)
        make()
        flock(lock, operation)

    make()
    flock = fcntl.flock
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", made_again)
        host_resources.remove_stale_folders()
    assert folder.exists()
    host_resources.remove_stale_folders()
    assert not folder.exists()
