"""Where an evaluator's values come from: files, settings, the clipboard, widgets, an answer.

    GETTERS    type of `result` or `expected` -> function that gets the value
    GetterContext      what getters may look at

A file that does not exist, or that its library cannot read, is None: the policy caused it, and it
fails. Any other error is raised, and makes the episode invalid.
"""

from __future__ import annotations

import configparser
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docx
import openpyxl
import pptx
from docx.opc.exceptions import PackageNotFoundError as NoDocumentError
from openpyxl.utils.exceptions import InvalidFileException
from PIL import Image
from pptx.exc import PackageNotFoundError as NoSlidesError

from bus.errors import TaskError
from envs.desktop.files import inside
from envs.desktop.odf import read_cells, read_paragraphs

MOST_BYTES = 32 << 20  # of a file that is judged

_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF")  # Pillow reads many more, hardly ever used
_UNREADABLE = (
    *(OSError, zipfile.BadZipFile, KeyError, ValueError, SyntaxError),
    *(EOFError, zlib.error, NotImplementedError),  # packed, but damaged
    RuntimeError,  # packed with a password, or nested too deeply
    *(InvalidFileException, NoDocumentError, NoSlidesError, Image.DecompressionBombError),
)


@dataclass(frozen=True)
class GetterContext:
    """What getters may look at."""

    home: Path
    clipboard: Callable[[], str | None]
    answer: str | None  # the policy's text in its action `answer`
    widgets: Callable[[], list[dict[str, Any]]]  # of all windows, if the desktop is accessible


def get(scene: GetterContext, kind: str, parameters: Mapping[str, Any]) -> Any:
    """The value. Raises TaskError for an unknown type or parameter."""
    if kind not in GETTERS:
        raise TaskError(f"no getter {kind!r}; there are {', '.join(sorted(GETTERS))}")
    try:
        return GETTERS[kind](scene, **parameters)
    except TypeError as error:
        raise TaskError(f"getter {kind}: {error}") from error


def rule(_: GetterContext, rules: Mapping[str, Any]) -> Any:
    """The task file's own value, as OSWorld writes it: {"rules": {"expected": ...}}."""
    return rules["expected"]


def text_file(scene: GetterContext, path: str) -> str | None:
    """A text file's text."""
    with suppress(OSError, UnicodeDecodeError):
        return _small(scene, path).read_text(encoding="utf-8")
    return None


def files(scene: GetterContext, path: str, hidden: bool = False) -> list[str] | None:
    """Files and folders (with a slash at the end) below a folder, sorted."""
    with suppress(OSError):
        folder = _within(scene, path)
        if folder.is_dir():
            found = [
                f"{each.relative_to(folder)}{'/' if each.is_dir() else ''}"
                for each in folder.rglob("*")
            ]
            return sorted(each for each in found if hidden or not each.startswith("."))
    return None


def _workbook(scene: GetterContext, path: str, *, data_only: bool = False) -> Any:
    """A workbook of openpyxl, which leaves a damaged file open that it was given by name."""
    with _small(scene, path).open("rb") as file:
        return openpyxl.load_workbook(file, data_only=data_only)


def cells(
    scene: GetterContext, path: str, cells: list[str], sheet: str = "", formulas: bool = False
) -> list[Any] | None:
    """Values of a workbook's cells, or their formulas; of its first sheet if none is named.

    The workbook is .xlsx or .ods.
    """
    with suppress(*_UNREADABLE):
        if path.endswith(".ods"):
            return list(read_cells(_small(scene, path), cells, sheet, formulas=formulas))
        book = _workbook(scene, path, data_only=not formulas)
        table = book[sheet] if sheet else book.worksheets[0]
        return [table[cell].value for cell in cells]
    return None


def formula(scene: GetterContext, path: str, cell: str, sheet: str = "") -> str | None:
    """A cell's formula, or its value as a text."""
    found = cells(scene, path, [cell], sheet, formulas=True)
    return None if found is None else str(found[0])


def cell_looks(
    scene: GetterContext, path: str, cells: list[str], sheet: str = ""
) -> list[Any] | None:
    """For each cell whether it is bold and italic, its alignment and its number format."""
    with suppress(*_UNREADABLE):
        book = _workbook(scene, path)
        table = book[sheet] if sheet else book.worksheets[0]
        return [
            {
                "bold": bool(table[cell].font.bold),
                "italic": bool(table[cell].font.italic),
                "align": table[cell].alignment.horizontal or "general",
                "format": table[cell].number_format,
            }
            for cell in cells
        ]
    return None


def sheets(scene: GetterContext, path: str) -> list[str] | None:
    """Names of a workbook's sheets."""
    with suppress(*_UNREADABLE):
        return list(_workbook(scene, path).sheetnames)
    return None


def paragraphs(scene: GetterContext, path: str) -> list[str] | None:
    """Texts of a document's paragraphs (.docx or .odt)."""
    with suppress(*_UNREADABLE):
        if path.endswith(".odt"):
            return read_paragraphs(_small(scene, path))
        return [each.text for each in docx.Document(str(_small(scene, path))).paragraphs]
    return None


def paragraph_looks(scene: GetterContext, path: str) -> list[dict[str, Any]] | None:
    """For each paragraph its style, its alignment, and whether all of it is bold or italic."""
    with suppress(*_UNREADABLE):
        document = docx.Document(str(_small(scene, path)))
        return [
            {
                "style": each.style.name if each.style else "",
                "align": each.alignment.name.lower() if each.alignment is not None else "",
                "bold": bool(each.runs) and all(run.bold for run in each.runs if run.text.strip()),
                "italic": bool(each.runs)
                and all(run.italic for run in each.runs if run.text.strip()),
            }
            for each in document.paragraphs
        ]
    return None


def slides(scene: GetterContext, path: str) -> list[list[str]] | None:
    """The texts of each slide's shapes."""
    with suppress(*_UNREADABLE):
        show = pptx.Presentation(str(_small(scene, path)))
        return [
            [shape.text_frame.text for shape in slide.shapes if shape.has_text_frame]
            for slide in show.slides
        ]
    return None


def picture(scene: GetterContext, path: str) -> dict[str, Any] | None:
    """A picture's format (PNG, JPEG, ...), width and height."""
    with suppress(*_UNREADABLE), _picture(scene, path) as found:
        return {"format": found.format, "width": found.width, "height": found.height}
    return None


def pixels(
    scene: GetterContext, path: str, at: list[tuple[float, float]]
) -> list[list[int]] | None:
    """Colours [r, g, b] of a picture at places that are shares of its width and height."""
    with suppress(*_UNREADABLE), _picture(scene, path) as found:
        width, height, colours = found.width, found.height, found.convert("RGB")
        return [list(colours.crop(_pixel(x * width, y * height)).tobytes()) for x, y in at]
    return None


def setting(scene: GetterContext, path: str, group: str, key: str) -> str | None:
    """A value of a settings file: `[group]`, `key=value`."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    with suppress(OSError, UnicodeDecodeError, configparser.Error):
        parser.read_string(_small(scene, path).read_text(encoding="utf-8"))
        return parser.get(group, key)
    return None


def gsetting(scene: GetterContext, schema: str, key: str) -> str | None:
    """A setting of an application by its schema, None while it is the default."""
    path = ".config/glib-2.0/settings/keyfile"
    return setting(scene, path, schema.replace(".", "/"), key)


def clipboard(scene: GetterContext) -> str | None:
    """The clipboard's text."""
    return scene.clipboard()


def accessibility_tree(scene: GetterContext, role: str = "") -> list[dict[str, Any]]:
    """Role, name, text and states of all widgets, or of those of a role."""
    return [each for each in scene.widgets() if role in ("", each["role"])]


def answer(scene: GetterContext) -> str | None:
    """What the policy answered."""
    return scene.answer


GETTERS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(rule, text_file, files, cells, formula, cell_looks, sheets, paragraphs, paragraph_looks),
        *(slides, picture, pixels, setting, gsetting, clipboard, accessibility_tree, answer),
    )
}


def _picture(scene: GetterContext, path: str) -> Image.Image:
    return Image.open(_small(scene, path), formats=_FORMATS)


def _pixel(x: float, y: float) -> tuple[int, int, int, int]:
    """The box of one pixel."""
    return int(x), int(y), int(x) + 1, int(y) + 1


def _within(scene: GetterContext, path: str) -> Path:
    """A place in HOME; a link of the policy's that leads out of it cannot be read."""
    try:
        return inside(scene.home, path)
    except TaskError as error:
        raise PermissionError(str(error)) from error


def _small(scene: GetterContext, path: str) -> Path:
    """A file in HOME that is not too large to be read."""
    place = _within(scene, path)
    if place.stat().st_size > MOST_BYTES:
        raise OSError(f"{path} is larger than {MOST_BYTES} bytes")
    return place
