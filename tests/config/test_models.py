"""A model folder that cannot be loaded is refused with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.errors import ConfigError
from bus.messages import Role
from dart_cli.config.load import load_config
from dart_cli.config.rules.check import check_config
from dart_cli.config.schema import Config
from dart_cli.data.checks import model_facts
from tests.config.mistakes import Case, assert_one_line, write
from tests.config.model_parts import write_model

CASES = [
    Case("no model folder", '[model]\npath = "no/model"\n', "model.path", "hf download"),
    Case("unknown builtin", '[model]\npath = "builtin:big"\n', "model.path", "'builtin:tiny'"),
    Case("empty model folder", '[model]\npath = "{folder}"\n', "model.path", "config.json"),
    Case(
        "model of another kind",
        '[model]\npath = "{llama}"\n',
        "model.path",
        "model_type is llama, which dart does not load: it has no vision tower; take a checkpoint",
    ),
    Case("model without weights", '[model]\npath = "{bare}"\n', "model.path", "*.safetensors"),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_folder_that_is_no_model_is_one_line_with_file_key_and_cure(
    case: Case, tmp_path: Path, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_one_line(case, write(case, tmp_path, places), capsys)


def test_a_model_folder_may_stand_under_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_model(tmp_path / "model")
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "~/model"\n')
    check_config(load_config(path), role="rollout")


@pytest.mark.parametrize("role", [None, "rollout", "train"])
def test_a_model_of_a_user_who_is_not_here_is_no_folder(role: Role | None) -> None:
    config = Config.model_validate(
        {"model": {"path": "~no.such.user/x"}, "rollout": {"engine": "transformers"}}
    )
    with pytest.raises(ConfigError, match=r"^model\.path is no folder: ~no\.such\.user/x; "):
        check_config(config, role=role)
    assert model_facts(config) is None
