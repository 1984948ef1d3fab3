"""The table of docs/families.md is that of the code, and counts the strings that pass."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

from dart_cli.config.families import FAMILIES

ROOT = Path(__file__).parents[2]


def table() -> str:
    text = (ROOT / "tests" / "language" / "family_strings.toml").read_text(encoding="utf-8")
    strings = Counter(each["family"] for each in tomllib.loads(text)["string"])
    rows = [
        "| family | checkpoints | `model_type` | action parser | coordinates | history | thought in it | strings |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, its in FAMILIES.items():
        kinds = ", ".join(f"`{kind}`" for kind in its.model_types)
        loads = kinds if its.is_loaded else f"{kinds}: action parser only"
        turns = "all" if its.history_turns >= 1000 else its.history_turns
        most = f" to {its.history_images_most}" if its.history_images_most else ""
        rows.append(
            f"| `{name}` | {its.title} | {loads} | `{its.action_parser}` | `{its.coordinates}` | "
            f"{its.history_images}{most}, {turns} | {its.thought} | {strings[name]} |"
        )
    return "\n".join(rows) + "\n"


def notes() -> str:
    return "".join(f"- `{name}`: {its.note}.\n" for name, its in FAMILIES.items() if its.note)


def sources() -> str:
    rows = ["| family | prompt, history and calls | licence |", "|---|---|---|"]
    rows += [f"| `{name}` | {its.source} | {its.licence} |" for name, its in FAMILIES.items()]
    return "\n".join(rows) + "\n"


def test_the_page_has_the_table_the_notes_and_the_sources() -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    for part in (table(), notes(), sources()):
        assert part in page, f"docs/families.md lacks:\n{part}"
