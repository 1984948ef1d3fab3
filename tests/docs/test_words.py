"""The rules of style that ruff does not have: names that say what a thing is, pages that are read without scrolling."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PARTICIPLES = frozenset(
    "asked begun called chosen done drawn ended found given gone got heard held kept known made missed named needed "
    "played said seen shown stopped taken told wanted written".split()
)
"""Names that say what happened to a thing in place of what it is."""

GENERATED = ("docs/cli.md", "docs/config.md")
HISTORY = ("docs/log.md", "CHANGELOG.md")
PAGES = [
    path
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    if str(path.relative_to(ROOT)) not in (*GENERATED, *HISTORY)
]
MOST_COLUMNS = 110
MOST_IN_A_CELL = 200


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def definitions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that the code gives, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name, node.lineno


@pytest.mark.parametrize("part", ["bus", "dart_cli", "envs", "benchmarks", "scripts"])
def test_no_participle_stands_alone_as_a_name(part: str) -> None:
    misnamed = [
        f"{relative(path)}:{line}: {name}"
        for path in sorted((ROOT / part).rglob("*.py"))
        for name, line in definitions(ast.parse(path.read_text(encoding="utf-8")))
        if name.strip("_") in PARTICIPLES
    ]
    assert misnamed == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_a_page_has_no_long_lines_and_no_long_cells(page: Path) -> None:
    """Tables, code and a link that is longer than a line are excepted from the length of lines."""
    long: list[str] = []
    in_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif in_code or line.startswith(("<", "![")):
            continue
        elif line.lstrip().startswith("|"):
            cells = [cell.strip() for cell in line.split("|")]
            long += [
                f"{number}: a cell of {len(cell)}" for cell in cells if len(cell) > MOST_IN_A_CELL
            ]
        elif len(line) > MOST_COLUMNS and "](" not in line.split()[-1]:
            long.append(f"{number}: a line of {len(line)}")
    assert long == []
