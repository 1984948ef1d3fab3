"""How a task is judged: where an evaluator's values come from, its functions, and the verdict.

    GETTERS        type of `result` or `expected` -> function that gets the value
    GetterContext  what getters may look at
    read_paragraphs, read_cells   OpenDocument files: texts of a document, values or formulas of a sheet
    METRICS        name -> function(result, expected, **options) -> bool; OSWorld's names where it has such one
    evaluate       all checks of a task -> a verdict

A file that does not exist, or that its library cannot read, is None: the policy caused it, and it
fails. Any other error is raised, and makes the episode invalid. OpenDocument is read as in the standard
(1.3, part 3), with the zip and XML of the standard library.
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
from envs.contract.textfiles import read_text
from envs.suites.desktop.files import inside
from envs.tools.taskfile import Check, Evaluator

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
    """Return the value. Raises TaskError for an unknown type or parameter."""
    if kind not in GETTERS:
        raise TaskError(f"no getter {kind!r}; there are {', '.join(sorted(GETTERS))}")
    try:
        return GETTERS[kind](scene, **parameters)
    except TypeError as error:
        raise TaskError(f"getter {kind}: {error}") from error


def rule(_: GetterContext, rules: Mapping[str, Any]) -> Any:
    """Return the task file's own value, as OSWorld writes it: {"rules": {"expected": ...}}."""
    return rules["expected"]


def text_file(scene: GetterContext, path: str) -> str | None:
    """Return a text file's text."""
    with suppress(OSError, UnicodeDecodeError):
        return read_text(_small(scene, path))
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
    """Return a workbook of openpyxl, which leaves a damaged file open that it was given by name."""
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
    """Return a cell's formula, or its value as a text."""
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
    """Return a value of a settings file: `[group]`, `key=value`."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    with suppress(OSError, UnicodeDecodeError, configparser.Error):
        parser.read_string(read_text(_small(scene, path)))
        return parser.get(group, key)
    return None


def gsetting(scene: GetterContext, schema: str, key: str) -> str | None:
    """Return a setting of an application by its schema, None while it is the default."""
    path = ".config/glib-2.0/settings/keyfile"
    return setting(scene, path, schema.replace(".", "/"), key)


def clipboard(scene: GetterContext) -> str | None:
    """Return the clipboard's text."""
    return scene.clipboard()


def accessibility_tree(scene: GetterContext, role: str = "") -> list[dict[str, Any]]:
    """Role, name, text and states of all widgets, or of those of a role."""
    return [each for each in scene.widgets() if role in ("", each["role"])]


def answer(scene: GetterContext) -> str | None:
    """Return what the policy answered."""
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
    """Return the box of one pixel."""
    return int(x), int(y), int(x) + 1, int(y) + 1


def _within(scene: GetterContext, path: str) -> Path:
    """Return a place in HOME; a link of the policy's that leads out of it cannot be read."""
    try:
        return inside(scene.home, path)
    except TaskError as error:
        raise PermissionError(str(error)) from error


def _small(scene: GetterContext, path: str) -> Path:
    """Return a file in HOME that is not too large to be read."""
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
    """Return a tag or attribute as ElementTree names it."""
    return f"{{{_SPACE}:{space}:1.0}}{name}"


_BLOCKS = (_tag("text", "p"), _tag("text", "h"))
_CELLS = (_tag("table", "table-cell"), _tag("table", "covered-table-cell"))


def read_paragraphs(path: Path) -> list[str]:
    """Texts of all paragraphs and headings, in order."""
    body = _body(path, "text")
    deleted = {each for old in body.iter(_tag("text", "tracked-changes")) for each in old.iter()}
    return [_text(each) for each in body.iter() if each.tag in _BLOCKS and each not in deleted]


def read_cells(
    path: Path, names: Sequence[str], sheet: str = "", *, formulas: bool
) -> list[CellValue]:
    """Values of cells by name (B6), or their formulas; of the first sheet if none is named."""
    tables = {
        table.get(_tag("table", "name"), ""): table
        for table in _body(path, "spreadsheet").findall(_tag("table", "table"))
    }
    table = tables[sheet or next(iter(tables), sheet)]
    wanted = [_place(name) for name in names]
    found = _find(table, {row for row, _ in wanted})
    return [_value(found.get(place), formulas) for place in wanted]


def _body(path: Path, kind: str) -> ET.Element:
    """Return what a file of a kind (text, spreadsheet) holds."""
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
    """Return the text of a paragraph; blanks in a row, tabs and line breaks are elements of their own."""

    def parts(element: ET.Element) -> Iterator[str]:
        yield element.text or ""
        for child in element:
            if child.tag == _tag("text", "s"):
                yield " " * min(int(child.get(_tag("text", "c"), "1")), MOST_CELLS)
            elif child.tag == _tag("text", "tab"):
                yield "\t"
            elif child.tag == _tag("text", "line-break"):
                yield "\n"
            elif child.tag not in _BLOCKS:  # such as those of a note
                yield from parts(child)
            yield child.tail or ""

    return "".join(parts(block))


def _find(table: ET.Element, rows: set[int]) -> dict[tuple[int, int], ET.Element]:
    """Return the cells of some rows by row and column, from 0; equal neighbours are given once."""
    found = {}
    top = 0
    for row in table.iter(_tag("table", "table-row")):
        below = top + int(row.get(_tag("table", "number-rows-repeated"), "1"))
        for at in (each for each in rows if top <= each < below):
            left = 0
            for cell in (each for each in row if each.tag in _CELLS):
                count = int(cell.get(_tag("table", "number-columns-repeated"), "1"))
                for column in range(left, min(left + count, MOST_CELLS)):
                    found[at, column] = cell
                left += count
        top = below
    return found


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
            return "\n".join(_text(each) for each in cell if each.tag in _BLOCKS)


def _place(name: str) -> tuple[int, int]:
    """Row and column of B6, from 0."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not a cell; write it like B6")
    column = 0
    for letter in found[1]:
        column = 26 * column + ord(letter) - ord("A") + 1
    return int(found[2]) - 1, column - 1


def exact_match(result: Any, expected: Any) -> bool:
    """Equal; 1 and 1.0 are, "1" and 1 are not."""
    return bool(result == expected)


def same_text(result: Any, expected: Any) -> bool:
    """Equal texts, ignoring space at line ends and around the whole."""
    return result is not None and _lines(result) == _lines(expected)


def near(result: Any, expected: Any, tolerance: float = 1e-6) -> bool:
    """Numbers, or lists of them, that differ by no more than `tolerance`."""
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
    """Return a text, or a list, that holds all of a list."""
    return result is not None and all(each in result for each in expected)


def lacks(result: Any, expected: Any) -> bool:
    """Return a text, or a list, that holds nothing of a list."""
    return result is not None and not any(each in result for each in expected)


def has_items(result: Any, expected: Mapping[str, Any]) -> bool:
    """Return a list whose items, by their number, have at least these fields: {"0": {"bold": true}}."""
    return result is not None and all(
        int(number) < len(result)
        and all(result[int(number)].get(key) == value for key, value in fields.items())
        for number, fields in expected.items()
    )


def includes_items(result: Any, expected: Sequence[Mapping[str, Any]]) -> bool:
    """Return a list that holds, for each of `expected`, an item with at least these fields."""
    return result is not None and all(
        any(fields.items() <= item.items() for item in result) for fields in expected
    )


METRICS: Mapping[str, Callable[..., bool]] = {
    each.__name__: each
    for each in (exact_match, same_text, near, includes, lacks, has_items, includes_items)
}


def evaluate(evaluator: Evaluator, scene: GetterContext) -> Verdict:
    """Pass or fail by the checks. Raises TaskError for a check that cannot be made."""
    failed = []
    for number, check in enumerate(evaluator.checks):
        holds, seen = _holds(check, scene)
        if holds and evaluator.conj == "or":
            return Verdict("pass", f"check {number} ({check.func}) holds")
        if not holds:
            failed.append(f"check {number} ({check.func}): got {seen}")
    if failed:
        return Verdict("fail", "; ".join(failed)[:500])
    return Verdict("pass", "all checks hold")


def _holds(check: Check, scene: GetterContext) -> tuple[bool, str]:
    """Whether a check holds, and the value it saw."""
    if check.func not in METRICS:
        raise TaskError(f"no function {check.func!r}; there are {', '.join(sorted(METRICS))}")
    result, expected = (
        None if getter is None else get(scene, getter.type, getter.parameters)
        for getter in (check.result, check.expected)
    )
    return METRICS[check.func](result, expected, **check.options), repr(result)[:200]


def _lines(text: Any) -> list[str]:
    return [line.rstrip() for line in str(text).strip().splitlines()]
