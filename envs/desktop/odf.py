"""OpenDocument files: texts of a document's paragraphs, values and formulas of a sheet's cells.

    read_paragraphs   .odt -> texts
    read_cells        .ods -> values, or formulas, of named cells

Written from the standard (OpenDocument 1.3, part 3) with the zip and XML of the standard library.
Raises ValueError, KeyError, OSError or zipfile.BadZipFile for any other file.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

MOST_BYTES = 64 << 20  # of a file's content, unpacked
MOST_CELLS = 1 << 20  # of a row; LibreOffice has 16,384 columns

CellValue = str | float | bool | None

_SPACE = "urn:oasis:names:tc:opendocument:xmlns"
_NAME = re.compile(r"([A-Z]{1,3})([1-9]\d{0,6})")


def _tag(space: str, name: str) -> str:
    """A tag or attribute as ElementTree names it."""
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
    """What a file of a kind (text, spreadsheet) holds."""
    with zipfile.ZipFile(path) as packed:
        if packed.getinfo("content.xml").file_size > MOST_BYTES:
            raise ValueError(f"{path} holds more than {MOST_BYTES} bytes")
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
    """The text of a paragraph; blanks in a row, tabs and line breaks are elements of their own."""

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
    """The cells of some rows by row and column, from 0; equal neighbours are given once."""
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
