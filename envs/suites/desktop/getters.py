"""Evaluates a task: where an evaluator's values come from, the functions that compare them, and the verdict.

    GETTERS        type of `result` or `expected` -> function that returns the value
    GetterContext  the parts of an episode that getters may read
    read_paragraphs, read_cells   read OpenDocument files: texts of a document, values or formulas of a sheet
    METRICS        name -> function(result, expected, **options) -> bool; functions that OSWorld has too have
                   its names
    evaluate       runs all checks of a task and returns the verdict

The value of a file that does not exist, or that its library cannot read, is None: the policy caused it, and
the check fails. Any other error is raised and makes the episode invalid. OpenDocument is read as in the
standard (1.3, part 3), with Python's zip and XML modules.
"""

from __future__ import annotations

import configparser
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import docx
import openpyxl
import pptx
from docx.opc.exceptions import PackageNotFoundError as NoDocumentError
from openpyxl.utils.exceptions import InvalidFileException
from PIL import Image
from pptx.exc import PackageNotFoundError as NoSlidesError

from bus.errors import TaskError
from envs.contract.base import Verdict
from envs.suites.desktop.files import inside
from envs.tools.taskfile import Check, Evaluator
from envs.tools.textfiles import read_text

MOST_BYTES = 32 << 20  # of a file that an evaluator reads

_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF")  # Pillow reads many more, which are hardly used
_UNREADABLE = (
    OSError,
    zipfile.BadZipFile,
    KeyError,
    ValueError,
    SyntaxError,
    EOFError,  # a damaged archive, as the next two
    zlib.error,
    NotImplementedError,
    RuntimeError,  # an archive with a password, or nested too deeply
    InvalidFileException,
    NoDocumentError,
    NoSlidesError,
    Image.DecompressionBombError,
)
"""Errors of the libraries for a file that they cannot read."""


@dataclass(frozen=True)
class GetterContext:
    """The parts of an episode that getters may read."""

    home: Path
    clipboard: Callable[[], str | None]
    answer: str | None  # the text of the policy's action `answer`
    widgets: Callable[[], list[dict[str, Any]]]  # of all windows, if the desktop is accessible


def get(scene: GetterContext, kind: str, parameters: Mapping[str, Any]) -> Any:
    """Return the value of the getter `kind`. Raises TaskError for an unknown type or parameter."""
    if kind not in GETTERS:
        raise TaskError(f"no getter {kind!r}; there are {', '.join(sorted(GETTERS))}")
    try:
        return GETTERS[kind](scene, **parameters)
    except TypeError as error:
        raise TaskError(f"getter {kind}: {error}") from error


def rule(_: GetterContext, rules: Mapping[str, Any]) -> Any:
    """Return a value that the task file holds, as OSWorld writes it: {"rules": {"expected": ...}}."""
    return rules["expected"]


def text_file(scene: GetterContext, path: str) -> str | None:
    """Return the text of a text file."""
    with suppress(OSError, UnicodeDecodeError):
        return read_text(_small(scene, path))
    return None


def files(scene: GetterContext, path: str, hidden: bool = False) -> list[str] | None:
    """Return the files and folders (with a slash at the end) below a folder, sorted."""
    with suppress(OSError):
        folder = _within(scene, path)
        if folder.is_dir():
            names = [
                f"{place.relative_to(folder)}{'/' if place.is_dir() else ''}"
                for place in folder.rglob("*")
            ]
            return sorted(name for name in names if hidden or not name.startswith("."))
    return None


def _workbook(scene: GetterContext, path: str, *, data_only: bool = False) -> Any:
    """Return a workbook. The file is opened here, since openpyxl leaves a damaged file open."""
    with _small(scene, path).open("rb") as file:
        return openpyxl.load_workbook(file, data_only=data_only)


def cells(
    scene: GetterContext, path: str, cells: list[str], sheet: str = "", formulas: bool = False
) -> list[Any] | None:
    """Return the values of a workbook's cells, or their formulas; from the first sheet if none is named.

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
    """Return a cell's formula, or its value as a text if it has no formula."""
    values = cells(scene, path, [cell], sheet, formulas=True)
    return None if values is None else str(values[0])


def cell_looks(
    scene: GetterContext, path: str, cells: list[str], sheet: str = ""
) -> list[Any] | None:
    """Return for each cell whether it is bold and italic, its alignment and its number format."""
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
    """Return the names of a workbook's sheets."""
    with suppress(*_UNREADABLE):
        return list(_workbook(scene, path).sheetnames)
    return None


def paragraphs(scene: GetterContext, path: str) -> list[str] | None:
    """Return the texts of a document's paragraphs (.docx or .odt)."""
    with suppress(*_UNREADABLE):
        if path.endswith(".odt"):
            return read_paragraphs(_small(scene, path))
        document = docx.Document(str(_small(scene, path)))
        return [paragraph.text for paragraph in document.paragraphs]
    return None


def paragraph_looks(scene: GetterContext, path: str) -> list[dict[str, Any]] | None:
    """Return for each paragraph its style, its alignment, and whether all of it is bold or italic."""

    def looks(paragraph: Any) -> dict[str, Any]:
        alignment = paragraph.alignment
        runs = [run for run in paragraph.runs if run.text.strip()]
        return {
            "style": paragraph.style.name if paragraph.style else "",
            "align": alignment.name.lower() if alignment is not None else "",
            "bold": bool(paragraph.runs) and all(run.bold for run in runs),
            "italic": bool(paragraph.runs) and all(run.italic for run in runs),
        }

    with suppress(*_UNREADABLE):
        document = docx.Document(str(_small(scene, path)))
        return [looks(paragraph) for paragraph in document.paragraphs]
    return None


def slides(scene: GetterContext, path: str) -> list[list[str]] | None:
    """Return the texts of each slide's shapes."""
    with suppress(*_UNREADABLE):
        show = pptx.Presentation(str(_small(scene, path)))
        return [
            [shape.text_frame.text for shape in slide.shapes if shape.has_text_frame]
            for slide in show.slides
        ]
    return None


def picture(scene: GetterContext, path: str) -> dict[str, Any] | None:
    """Return a picture's format (PNG, JPEG, ...), width and height."""
    with suppress(*_UNREADABLE), _picture(scene, path) as image:
        return {"format": image.format, "width": image.width, "height": image.height}
    return None


def pixels(
    scene: GetterContext, path: str, at: list[tuple[float, float]]
) -> list[list[int]] | None:
    """Return the colours [r, g, b] of a picture at points, given as fractions of its width and height."""
    with suppress(*_UNREADABLE), _picture(scene, path) as image:
        width, height, colours = image.width, image.height, image.convert("RGB")
        return [list(colours.crop(_pixel(x * width, y * height)).tobytes()) for x, y in at]
    return None


def setting(scene: GetterContext, path: str, group: str, key: str) -> str | None:
    """Return a value of a settings file: `[group]`, `key=value`."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    with suppress(OSError, UnicodeDecodeError, configparser.Error):
        parser.read_string(read_text(_small(scene, path)))
        return parser.get(group, key)
    return None


def gsetting(scene: GetterContext, schema: str, key: str) -> str | None:
    """Return a setting of an application by its schema; None while it has its default."""
    path = ".config/glib-2.0/settings/keyfile"
    return setting(scene, path, schema.replace(".", "/"), key)


def clipboard(scene: GetterContext) -> str | None:
    """Return the clipboard's text."""
    return scene.clipboard()


def accessibility_tree(scene: GetterContext, role: str = "") -> list[dict[str, Any]]:
    """Return role, name, text and states of all widgets, or of the widgets with this role."""
    return [widget for widget in scene.widgets() if role in ("", widget["role"])]


def answer(scene: GetterContext) -> str | None:
    """Return the policy's answer."""
    return scene.answer


GETTERS: Mapping[str, Callable[..., Any]] = {
    getter.__name__: getter
    for getter in (
        rule,
        text_file,
        files,
        cells,
        formula,
        cell_looks,
        sheets,
        paragraphs,
        paragraph_looks,
        slides,
        picture,
        pixels,
        setting,
        gsetting,
        clipboard,
        accessibility_tree,
        answer,
    )
}


def _picture(scene: GetterContext, path: str) -> Image.Image:
    return Image.open(_small(scene, path), formats=_FORMATS)


def _pixel(x: float, y: float) -> tuple[int, int, int, int]:
    """Return the box of one pixel."""
    return int(x), int(y), int(x) + 1, int(y) + 1


def _within(scene: GetterContext, path: str) -> Path:
    """Return a path in HOME. Raises PermissionError if it leads out, e.g. by a link that the policy made."""
    try:
        return inside(scene.home, path)
    except TaskError as error:
        raise PermissionError(str(error)) from error


def _small(scene: GetterContext, path: str) -> Path:
    """Return the path of a file in HOME. Raises OSError if it is too large to be read."""
    place = _within(scene, path)
    if place.stat().st_size > MOST_BYTES:
        raise OSError(f"{path} is larger than {MOST_BYTES} bytes")
    return place


MOST_UNPACKED = 64 << 20  # bytes of a file's content
MOST_CELLS = 1 << 20  # of a row; LibreOffice has 16,384 columns

CellValue = str | float | bool | None

_SPACE = "urn:oasis:names:tc:opendocument:xmlns"
_NAME = re.compile(r"([A-Z]{1,3})([1-9]\d{0,6})")


def _tag(space: str, name: str) -> str:
    """Return a tag or an attribute in ElementTree's form."""
    return f"{{{_SPACE}:{space}:1.0}}{name}"


_BLOCKS = (_tag("text", "p"), _tag("text", "h"))
_CELLS = (_tag("table", "table-cell"), _tag("table", "covered-table-cell"))


def read_paragraphs(path: Path) -> list[str]:
    """Return the texts of all paragraphs and headings, in order."""
    body = _body(path, "text")
    changes = body.iter(_tag("text", "tracked-changes"))
    deleted = {block for change in changes for block in change.iter()}
    return [_text(block) for block in body.iter() if block.tag in _BLOCKS and block not in deleted]


def read_cells(
    path: Path, names: Sequence[str], sheet: str = "", *, formulas: bool
) -> list[CellValue]:
    """Return the values of cells by name (B6), or their formulas; from the first sheet if none is named."""
    tables = {
        table.get(_tag("table", "name"), ""): table
        for table in _body(path, "spreadsheet").findall(_tag("table", "table"))
    }
    table = tables[sheet or next(iter(tables), sheet)]
    places = [_place(name) for name in names]
    elements = _cells_of(table, {row for row, _ in places})
    return [_value(elements.get(place), formulas) for place in places]


def _body(path: Path, kind: str) -> ET.Element:
    """Return the body of a file of this kind (text, spreadsheet). Raises ValueError for another kind."""
    with zipfile.ZipFile(path) as packed:
        if packed.getinfo("content.xml").file_size > MOST_UNPACKED:
            raise ValueError(f"{path} holds more than {MOST_UNPACKED} bytes")
        content = packed.read("content.xml")
    try:
        root = ET.fromstring(content)  # noqa: S314 - expat bounds how entities grow
    except ET.ParseError as error:
        raise ValueError(f"{path}: {error}") from error
    body = root.find(f"{_tag('office', 'body')}/{_tag('office', kind)}")
    if body is None:
        raise ValueError(f"{path} is not an OpenDocument {kind}")
    return body


def _text(block: ET.Element) -> str:
    """Return the text of a paragraph, in which repeated blanks, tabs and line breaks are elements."""

    def parts(element: ET.Element) -> Iterator[str]:
        yield element.text or ""
        for child in element:
            if child.tag == _tag("text", "s"):
                yield " " * min(int(child.get(_tag("text", "c"), "1")), MOST_CELLS)
            elif child.tag == _tag("text", "tab"):
                yield "\t"
            elif child.tag == _tag("text", "line-break"):
                yield "\n"
            elif child.tag not in _BLOCKS:  # a note, for example, has its own paragraphs
                yield from parts(child)
            yield child.tail or ""

    return "".join(parts(block))


def _cells_of(table: ET.Element, rows: set[int]) -> dict[tuple[int, int], ET.Element]:
    """Return (row, column) -> cell of some rows, counted from 0.

    The file holds equal neighbours only once.
    """
    cells_by_place = {}
    top = 0
    for row in table.iter(_tag("table", "table-row")):
        below = top + int(row.get(_tag("table", "number-rows-repeated"), "1"))
        for at in (number for number in rows if top <= number < below):
            left = 0
            for cell in (child for child in row if child.tag in _CELLS):
                count = int(cell.get(_tag("table", "number-columns-repeated"), "1"))
                for column in range(left, min(left + count, MOST_CELLS)):
                    cells_by_place[at, column] = cell
                left += count
        top = below
    return cells_by_place


def _value(cell: ET.Element | None, formulas: bool) -> CellValue:
    if cell is None:
        return None
    formula = cell.get(_tag("table", "formula"))
    if formulas and formula is not None:
        return formula.removeprefix("of:")
    match cell.get(_tag("office", "value-type")):
        case None:
            return None
        case "float" | "percentage" | "currency":
            return float(cell.get(_tag("office", "value"), "nan"))
        case "boolean":
            return cell.get(_tag("office", "boolean-value")) == "true"
        case _:
            return "\n".join(_text(block) for block in cell if block.tag in _BLOCKS)


def _place(name: str) -> tuple[int, int]:
    """Return (row, column), counted from 0, of a cell's name such as B6."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a cell; write it like B6")
    column = 0
    for letter in match[1]:
        column = 26 * column + ord(letter) - ord("A") + 1
    return int(match[2]) - 1, column - 1


def exact_match(result: Any, expected: Any) -> bool:
    """Return True if the values are equal: 1 and 1.0 are, "1" and 1 are not."""
    return bool(result == expected)


def same_text(result: Any, expected: Any) -> bool:
    """Return True if the texts are equal, apart from white space at line ends and around the whole."""
    return result is not None and _lines(result) == _lines(expected)


def near(result: Any, expected: Any, tolerance: float = 1e-6) -> bool:
    """Return True if the numbers, or all numbers of two lists, differ by no more than `tolerance`."""
    if isinstance(expected, list):
        return (
            isinstance(result, list)
            and len(result) == len(expected)
            and all(map(lambda a, b: near(a, b, tolerance), result, expected))
        )
    try:
        number = float(result)
    except (TypeError, ValueError):
        return False
    return math.isclose(number, float(expected), abs_tol=tolerance, rel_tol=0.0)


def includes(result: Any, expected: Any) -> bool:
    """Return True if a text or a list contains all items of `expected`."""
    return result is not None and all(item in result for item in expected)


def lacks(result: Any, expected: Any) -> bool:
    """Return True if a text or a list contains no item of `expected`."""
    return result is not None and not any(item in result for item in expected)


def has_items(result: Any, expected: Mapping[str, Any]) -> bool:
    """Return True if the items of a list, by their number, have these fields: {"0": {"bold": true}}."""
    return result is not None and all(
        int(number) < len(result)
        and all(result[int(number)].get(key) == value for key, value in fields.items())
        for number, fields in expected.items()
    )


def includes_items(result: Any, expected: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a list contains, for each of `expected`, an item with at least these fields."""
    return result is not None and all(
        any(fields.items() <= item.items() for item in result) for fields in expected
    )


METRICS: Mapping[str, Callable[..., bool]] = {
    metric.__name__: metric
    for metric in (exact_match, same_text, near, includes, lacks, has_items, includes_items)
}


def evaluate(evaluator: Evaluator, scene: GetterContext) -> Verdict:
    """Return pass or fail by the checks. Raises TaskError for an unknown function, getter or parameter."""
    failures = []
    for number, check in enumerate(evaluator.checks):
        holds, value = _holds(check, scene)
        if holds and evaluator.conj == "or":
            return Verdict("pass", f"check {number} ({check.func}) holds")
        if not holds:
            failures.append(f"check {number} ({check.func}): got {value}")
    if failures:
        return Verdict("fail", "; ".join(failures)[:500])
    return Verdict("pass", "all checks hold")


def _holds(check: Check, scene: GetterContext) -> tuple[bool, str]:
    """Return (whether a check holds, the value that it read)."""
    if check.func not in METRICS:
        raise TaskError(f"no function {check.func!r}; there are {', '.join(sorted(METRICS))}")
    result, expected = (
        None if getter is None else get(scene, getter.type, getter.parameters)
        for getter in (check.result, check.expected)
    )
    return METRICS[check.func](result, expected, **check.options), repr(result)[:200]


def _lines(text: Any) -> list[str]:
    return [line.rstrip() for line in str(text).strip().splitlines()]
