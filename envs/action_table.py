"""The table of actions in docs/environments/index.md, made from envs/actions.py.

table       each class with its fields, units and an example, as Markdown
with_table  the page with the table put between its marks; `python -m dart_cli.cli.reference` writes it
"""

from __future__ import annotations

import inspect
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from envs.actions import Action

BEGIN, END = "<!-- table actions -->\n", "<!-- end actions -->"
CLASSES: tuple[type[BaseModel], ...] = get_args(get_args(Action)[0])


def table() -> str:
    """One row for each class, in the order of the union."""
    lines = ["| class, `kind` | what it does | fields | example |", "|---|---|---|---|"]
    for each in CLASSES:
        told, _, example = (inspect.getdoc(each) or "").partition("\n\nExample: ")
        fields = [
            _field(name, field) for name, field in each.model_fields.items() if name != "kind"
        ]
        kind = each.model_fields["kind"].default
        cells = (f"`{each.__name__}`, `{kind}`", " ".join(told.split()), "<br>".join(fields) or "-")
        lines.append(f"| {' | '.join(cells)} | `{example}` |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The page with the present table. Raises ValueError for one without its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs the marks {BEGIN.strip()} and {END}")
    return f"{before}{BEGIN}{table()}\n{END}{after}"


def _field(name: str, field: FieldInfo) -> str:
    """Its name, type, default and unit."""
    default = "" if field.is_required() else f" = {field.default!r}"
    told = f": {field.description}" if field.description else ""
    return f"`{name}` {_type(field.annotation)}{default.replace(chr(39), chr(34))}{told}"


def _type(annotation: Any) -> str:
    """A type in words."""
    inner = get_args(annotation)
    kind = get_origin(annotation)
    if kind is Literal:
        return ", ".join(f'"{value}"' for value in inner)
    if kind in (Union, UnionType):
        return " or ".join(map(_type, inner))
    if kind is list or (kind is tuple and inner[-1] is Ellipsis):
        return f"{kind.__name__} of {_type(inner[0])}"
    if kind is tuple:
        return f"({', '.join(map(_type, inner))})"
    return "None" if annotation is NoneType else str(annotation.__name__)
