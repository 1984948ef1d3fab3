"""The starter file and the reference page are what the fields say."""

from __future__ import annotations

from pathlib import Path

from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.config.template import config_reference, starter_toml
from dart_cli.config.validate import check_config

ROOT = Path(__file__).parents[2]


def test_the_starter_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "dart.toml"
    path.write_text(starter_toml(path))
    assert load_config(path) == Config()
    check_config(load_config(path))


def test_the_reference_page_is_what_the_fields_say() -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == config_reference(), "run: python -m dart_cli.cli.reference"
