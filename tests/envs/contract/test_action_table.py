"""The page of the contract lists every action as its class, and its examples can be typed as they stand."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from pydantic import BaseModel

from envs.contract.actions import CLASSES, END, table, with_table

PAGE = Path(__file__).parents[3] / "docs" / "environments" / "index.md"


def test_the_page_lists_the_actions_as_they_are() -> None:
    """Fix with `python -m dart_cli.cli.reference`."""
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text
    with pytest.raises(ValueError, match="needs the marks"):
        with_table(text.replace(END, ""))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_action_s_row_has_its_fields_and_an_example_that_makes_one(
    kind: type[BaseModel],
) -> None:
    [row] = [line for line in table().splitlines() if line.startswith(f"| `{kind.__name__}`")]
    for name, field in kind.model_fields.items():
        assert name == "kind" or f"`{name}` " in row
        assert name in ("kind", "button") or field.description, f"{name} has no unit or meaning"
    example = (inspect.getdoc(kind) or "").partition("Example: ")[2]
    assert f"`{example}`" in row
    call = ast.parse(example, mode="eval").body
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.func) == kind.__name__
    kind(**{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
