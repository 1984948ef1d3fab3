"""The list of what dart relies on in vLLM is whole, true of the installed one, and notices changes."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from dart_cli.config.source_checks import (
    Called,
    Has,
    Implemented,
    Module,
    Named,
    Need,
    Overridden,
    Used,
)
from dart_cli.config.vllm_parts import PARTS, Part, missing_parts
from dart_cli.config.vllm_support import vllm_folder

ROOT = Path(__file__).parents[2]
OURS = ROOT / "dart_cli" / "engines" / "vllm"
needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: scripts/setup-vllm"
)

SOURCE = """
import torch
from elsewhere import Replaced, Unused

if torch:
    from elsewhere import Late

def call(first, *, named=1, asked): ...

class Base:
    field: int = 0

    def __init__(self, config):
        self.attribute = Replaced()

    @property
    def read(self): ...

    @staticmethod
    def fixed(one): ...

    @abstractmethod
    def must(self, given, other=None, *rest, **options): ...
"""


@pytest.mark.parametrize(
    ("need", "told"),
    [
        (Named("f", "Late"), ""),
        (Named("f", "Gone"), "has no Gone"),
        (Used("f", "Replaced"), ""),
        (Used("f", "Unused"), "does not use Unused"),
        (Overridden("f", "Base.must", ("given", "other", "*rest", "**options")), ""),
        (Overridden("f", "Base.must", ("given",)), "not (given)"),
        (Overridden("f", "Base.gone", ()), "has no Base.gone"),
        (Called("f", "call", 1, ("asked",)), ""),
        (Called("f", "call", 1), "asks for asked"),
        (Called("f", "call", 2, ("asked",)), "not 2"),
        (Called("f", "call", 1, ("asked", "new")), "no parameter new"),
        (Called("f", "Base.fixed", 1), ""),
        (Called("f", "Base.must", 5, ("any",)), ""),
        (Has("f", "Base", ("field", "attribute", "read")), ""),
        (Has("f", "Base", ("field", "gone")), "has no gone"),
        (Implemented("f", "Base", ("must",)), ""),
        (Implemented("f", "Base", ("must", "also")), "other abstract methods: also"),
    ],
)
def test_a_need_says_what_differs_in_a_file(need: Need, told: str) -> None:
    problem = need.problem(Module(ast.parse(SOURCE)))
    assert told in problem
    assert bool(told) == bool(problem)


@needs_vllm
def test_the_installed_vllm_has_every_part() -> None:
    folder = vllm_folder()
    assert folder is not None
    assert missing_parts(folder) == []


@needs_vllm
@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_a_part_that_vllm_renames_is_named(part: Part, tmp_path: Path) -> None:
    folder = vllm_folder()
    assert folder is not None
    first = part.needs[0]
    alone = replace(part, needs=(first,))
    copy = tmp_path / first.file
    copy.parent.mkdir(parents=True)
    text = (folder / first.file).read_text(encoding="utf-8")
    copy.write_text(re.sub(rf"\b{first.name.rpartition('.')[2]}\b", "Another", text), "utf-8")
    [line] = missing_parts(tmp_path, [alone])
    assert line.startswith(f"{part.name} ({first.file} ")
    copy.unlink()
    assert missing_parts(tmp_path, [alone]) == [f"{part.name} ({first.file} is absent)"]


def test_every_class_and_function_of_vllm_that_is_imported_belongs_to_a_part() -> None:
    listed = {need.name.partition(".")[0] for part in PARTS for need in part.needs}
    imported: dict[str, str] = {}
    for file in OURS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                imported |= {alias.name: file.name for alias in node.names}
    modules = {"gpu_model_runner", "qwen2", "qwen3", "current_platform"}  # parts within, or public
    assert imported
    assert {name: file for name, file in imported.items() if name not in listed | modules} == {}


@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_the_test_that_notices_a_change_of_a_part_is_there(part: Part) -> None:
    file, _, name = part.test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / "engines" / file).read_text(encoding="utf-8")
    for ours in re.findall(r"\w+\.py", part.ours):
        assert (OURS / ours).exists()
