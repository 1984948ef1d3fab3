"""benchmarks/README.md names every result file and only scripts that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "benchmarks"
INDEX = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_result_is_in_the_index_and_every_script_of_it_exists() -> None:
    results = {path.name for path in (ROOT / "results").glob("*.json")}
    named = set(re.findall(r"`([\w-]+\.json)`", INDEX))
    assert results == named
    scripts = set(re.findall(r"`(\w+/\w+\.py)\b", INDEX.split("## Answered")[0]))
    assert [each for each in sorted(scripts) if not (ROOT / each).is_file()] == []


def test_every_command_is_in_the_index() -> None:
    """But for parts that another script starts."""
    helpers = {"local_nodes.py", "ranks.py"}
    commands = {
        f"{path.parent.name}/{path.name}"
        for path in ROOT.glob("*/*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8") and path.name not in helpers
    }
    assert {each for each in commands if f"`{each}" not in INDEX} == set()
