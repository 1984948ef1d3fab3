"""The starter file and the reference page are what the fields say."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.errors import MissingPartError
from dart_cli.config.families import with_family
from dart_cli.config.learning_rate import with_rate
from dart_cli.config.load import load_config
from dart_cli.config.rules.check import check_config
from dart_cli.config.schema import Config, LoraConfig, inner_section, section_types
from dart_cli.config.task_split import training_tasks
from dart_cli.config.template import (
    TEMPLATES,
    config_reference,
    starter_toml,
    template_values,
    write_starter,
)
from envs.tools.browser.process import find_chromium

ROOT = Path(__file__).parents[2]
SUITES = {"own-env": "{}/my_env.py:GuestsSuite", "web": "web:{}/web/guests.toml"}
"""Template -> the suite in the folder that it is written to."""


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_starter_is_its_template_with_every_key(tmp_path: Path, template: str) -> None:
    written = write_starter(tmp_path / "mine", template, full=True)
    path = tmp_path / "mine" / "dart.toml"
    assert path in written
    config = load_config(path)
    expected = template_values(template)
    expected["run"]["dir"] = "runs/mine"
    if template in SUITES:
        expected["env"]["suite"] = SUITES[template].format(tmp_path / "mine")
    assert config == with_family(with_rate(Config.model_validate(expected)))
    text = path.read_text()
    for name, section in section_types().items():
        assert f"[{name}]" in text
        fields = section.model_fields.items()
        assert all(
            f"{key} =" in text for key, field in fields if not inner_section(field.annotation)
        )


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_short_starter_sets_what_the_full_one_sets(tmp_path: Path, template: str) -> None:
    whole, short = (tmp_path / kind / "mine" for kind in ("whole", "short"))
    write_starter(whole, template, full=True)
    write_starter(short, template)
    full, brief = (load_config(each / "dart.toml") for each in (whole, short))
    assert brief.run.dir == Path("runs/mine")
    if template in SUITES:
        assert brief.env.suite == SUITES[template].format(short)
        full = full.model_copy(update={"env": brief.env})
    assert brief == full


@pytest.mark.parametrize("template", ["tiny", "own-env", "web"])
def test_a_starter_is_some_20_lines_and_names_its_own_path(tmp_path: Path, template: str) -> None:
    path = write_starter(tmp_path / "mine", template)[-1]
    lines = path.read_text().splitlines()
    assert sum("=" in line and not line.startswith("#") for line in lines) <= 20
    assert len([line for line in lines if line]) <= 30
    assert f"dart up {path}" in path.read_text()
    assert "--full" in path.read_text()
    for rare in ("vllm", "serve", "tune"):
        assert f"[{rare}]" not in path.read_text()


def test_the_full_starter_has_the_sections_that_most_runs_never_read_as_comments(
    tmp_path: Path,
) -> None:
    [path] = write_starter(tmp_path, full=True)
    lines = path.read_text().splitlines()
    for rare in ("vllm", "serve", "tune"):
        assert f"# [{rare}]" in lines
        assert f"[{rare}]" not in lines


@pytest.mark.parametrize("full", [False, True], ids=["short", "full"])
@pytest.mark.parametrize("template", ["tiny", "own-env", "web"])
def test_a_starter_runs_as_it_is(
    tmp_path: Path, template: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if template == "web":
        try:
            find_chromium()
        except MissingPartError as missing:
            pytest.skip(str(missing))
    monkeypatch.chdir(tmp_path)
    write_starter(Path("mine"), template, full=full)
    config = load_config(Path("mine/dart.toml"))
    check_config(config)
    assert training_tasks(config)
    assert (
        config.train.lr >= 1e-4
    )  # of a small model; the default is a 7B's, with which it learns nothing


def test_a_starter_has_an_optional_section_that_one_character_a_line_turns_on(
    tmp_path: Path,
) -> None:
    [path] = write_starter(tmp_path, full=True)
    assert load_config(path).model.lora is None
    lines = path.read_text().splitlines()
    first = lines.index("# [model.lora]")
    end = lines.index("", first)
    on = [line.removeprefix("# ") for line in lines[first:end]]
    path.write_text("\n".join([*lines[:first], *on, *lines[end:]]))
    assert load_config(path).model.lora == LoraConfig()


def test_a_starter_of_a_template_with_an_optional_section_has_its_values(tmp_path: Path) -> None:
    text = starter_toml(tmp_path, "tiny", {"model": {"lora": {"rank": 8}}})
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert load_config(path).model.lora == LoraConfig(rank=8)


def test_the_reference_page_is_what_the_fields_say() -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == config_reference(), "run: python -m dart_cli.cli.reference"
