"""Makes the files of a task before its desktop starts.

    MAKERS     set-up step type -> function that makes such a file in HOME
    inside     returns a path in HOME, and refuses a path outside it
    date_all   gives all files the same date

Dates within files are fixed, so that the same task and seed make the same files.
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
"""The date of all files, as applications show it."""


def inside(home: Path, path: str) -> Path:
    """Return `path` below HOME. Raises TaskError if it leads out of HOME."""
    place = (home / path).resolve()
    if not place.is_relative_to(home.resolve()):
        raise TaskError(f"{path} is not below HOME")
    return place


def make_folder(home: Path, path: str) -> None:
    """Make an empty folder."""
    inside(home, path).mkdir(parents=True, exist_ok=True)


def make_text(home: Path, path: str, lines: list[Any]) -> None:
    """Make a text file of these lines."""
    _path_of_new_file(home, path).write_text(
        "".join(f"{line}\n" for line in lines), encoding="utf-8"
    )


def make_spreadsheet(home: Path, path: str, sheets: Mapping[str, list[list[Any]]]) -> None:
    """Make a workbook: rows of cells by sheet; a text that begins with = is a formula."""
    book = openpyxl.Workbook()
    book.remove(book.active)
    book.properties.created = book.properties.modified = MADE.replace(tzinfo=None)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(_path_of_new_file(home, path))


def make_document(home: Path, path: str, paragraphs: list[Any]) -> None:
    """Make a text document: texts, or {"text", "style"} with a style's name such as Heading 1."""
    document = docx.Document()
    for paragraph in paragraphs:
        fields = {"text": paragraph} if not isinstance(paragraph, Mapping) else paragraph
        document.add_paragraph(str(fields["text"]), style=fields.get("style"))
    document.save(str(_path_of_new_file(home, path)))


def make_slides(home: Path, path: str, slides: list[Mapping[str, Any]]) -> None:
    """Make a presentation: {"title", "lines"} for each slide."""
    show = pptx.Presentation()
    for content in slides:
        slide = show.slides.add_slide(show.slide_layouts[1])
        slide.shapes.title.text = str(content["title"])
        slide.placeholders[1].text = "\n".join(map(str, content.get("lines", [])))
    show.save(str(_path_of_new_file(home, path)))


def make_picture(
    home: Path, path: str, size: list[int], patches: list[tuple[list[int], list[int]]]
) -> None:
    """Make a picture of `size` [width, height]; `patches` are rectangles with their colour [r, g, b].

    A rectangle is [left, top, right, bottom].
    """
    picture = Image.new("RGB", (size[0], size[1]), "white")
    for (left, top, right, bottom), colour in patches:
        picture.paste(tuple(colour), (left, top, right, bottom))
    picture.save(_path_of_new_file(home, path))


MAKERS: Mapping[str, Callable[..., None]] = {
    "folder": make_folder,
    "text": make_text,
    "spreadsheet": make_spreadsheet,
    "document": make_document,
    "slides": make_slides,
    "picture": make_picture,
}


def date_all(folder: Path) -> None:
    """Set the date of `folder` and of all files and folders below it to MADE."""
    when = MADE.timestamp()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (when, when), follow_symlinks=False)


def _path_of_new_file(home: Path, path: str) -> Path:
    """Return `path` below HOME, and make the folders above it. Raises TaskError."""
    place = inside(home, path)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place
