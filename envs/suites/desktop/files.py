"""Files of a task: made before the desktop starts, read when it is judged.

    MAKERS     set-up step type -> function that makes such a file in HOME
    inside     a path in HOME; paths outside it are refused

Dates inside are fixed: the same task and seed make the same files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docx
import openpyxl
import pptx
from PIL import Image

from bus.errors import TaskError

MADE = datetime(2024, 5, 6, 9, 30, tzinfo=UTC)
"""When all files were made, as applications show it."""


def inside(home: Path, path: str) -> Path:
    """`path` below HOME. Raises TaskError if it leads out."""
    found = (home / path).resolve()
    if not found.is_relative_to(home.resolve()):
        raise TaskError(f"{path} is not below HOME")
    return found


def make_folder(home: Path, path: str) -> None:
    """Make an empty folder."""
    inside(home, path).mkdir(parents=True, exist_ok=True)


def make_text(home: Path, path: str, lines: list[Any]) -> None:
    """Make a text file of these lines."""
    _place(home, path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def make_spreadsheet(home: Path, path: str, sheets: Mapping[str, list[list[Any]]]) -> None:
    """Make a workbook: rows of cells by sheet; a text that begins with = is a formula."""
    book = openpyxl.Workbook()
    book.remove(book.active)
    book.properties.created = book.properties.modified = MADE.replace(tzinfo=None)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(_place(home, path))


def make_document(home: Path, path: str, paragraphs: list[Any]) -> None:
    """Make a text document: texts, or {"text", "style"} with a style's name such as Heading 1."""
    document = docx.Document()
    for each in paragraphs:
        told = {"text": each} if not isinstance(each, Mapping) else each
        document.add_paragraph(str(told["text"]), style=told.get("style"))
    document.save(str(_place(home, path)))


def make_slides(home: Path, path: str, slides: list[Mapping[str, Any]]) -> None:
    """Make a presentation: {"title", "lines"} for each slide."""
    show = pptx.Presentation()
    for told in slides:
        slide = show.slides.add_slide(show.slide_layouts[1])
        slide.shapes.title.text = str(told["title"])
        slide.placeholders[1].text = "\n".join(map(str, told.get("lines", [])))
    show.save(str(_place(home, path)))


def make_picture(
    home: Path, path: str, size: list[int], patches: list[tuple[list[int], list[int]]]
) -> None:
    """Make a picture, [width, height]: rectangles [left, top, right, bottom] in a colour [r, g, b]."""
    picture = Image.new("RGB", (size[0], size[1]), "white")
    for (left, top, right, bottom), colour in patches:
        picture.paste(tuple(colour), (left, top, right, bottom))
    picture.save(_place(home, path))


MAKERS: Mapping[str, Callable[..., None]] = {
    "folder": make_folder,
    "text": make_text,
    "spreadsheet": make_spreadsheet,
    "document": make_document,
    "slides": make_slides,
    "picture": make_picture,
}


def date_all(folder: Path) -> None:
    """Give every file and folder below the one date."""
    when = MADE.timestamp()
    for each in (*folder.rglob("*"), folder):
        os.utime(each, (when, when), follow_symlinks=False)


def _place(home: Path, path: str) -> Path:
    place = inside(home, path)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place
