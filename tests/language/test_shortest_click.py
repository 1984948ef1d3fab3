"""A completion that cannot hold a click is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dart_cli.cli.main import main
from dart_cli.config.model_folder import BUILTIN
from dart_cli.config.schema import Config
from dart_cli.doctor.run_checks import configuration
from dart_cli.language.shortest_click import find_cut_off

FITS = 5
"""Tokens of click(0,0) for the tiny model."""


def config(most: int, **sections: dict[str, Any]) -> Config:
    """A run of the tiny model whose completions have at most so many tokens."""
    rollout = {"max_tokens": most, **sections.pop("rollout", {})}
    return Config.model_validate({"rollout": rollout, **sections})


def test_the_shortest_click_is_counted_by_the_models_own_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(BUILTIN["builtin:tiny"] / "tokenizer.json"))
    assert len(tokenizer.encode("click(0,0)", add_special_tokens=False).ids) == FITS
    assert find_cut_off(config(FITS)) is None
    mistake = find_cut_off(config(FITS - 1))
    assert mistake is not None
    assert mistake.subject == "rollout.max_tokens"
    assert f"must be >= {FITS}" in str(mistake)
    assert "click(0,0)" in str(mistake)
    assert "got 4" in str(mistake)


@pytest.mark.parametrize("verb", [["up"], ["rollout"], ["eval"]])
def test_every_verb_that_asks_the_model_refuses_in_one_line(
    tmp_path: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\ndir = "{tmp_path / "run"}"\n[rollout]\nmax_tokens = 2\n')
    with pytest.raises(SystemExit) as exit_:
        main([*verb, str(path), "--dry-run"])
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert err.count("\n") == 1
    assert "rollout.max_tokens must be >= 5" in err
    assert err.endswith(f"({path})\n")
    assert not (tmp_path / "run").exists()


def test_doctor_tells_it_with_the_mistakes_of_the_configuration() -> None:
    [finding] = configuration(config(2))
    assert (finding.level, finding.subject) == ("error", "rollout.max_tokens")
    assert "rollout.max_tokens must be >= 5" in str(finding)


def test_a_call_is_counted_without_the_thought_before_it() -> None:
    mistake = find_cut_off(config(2, policy={"action_parser": "uitars"}))
    assert mistake is not None
    assert "Thought" not in str(mistake)


def test_a_pointer_is_three_tokens_in_the_place_of_the_numbers() -> None:
    pointing = {"pointing": "pointer"}
    mistake = find_cut_off(config(2, policy=pointing))
    assert mistake is not None
    assert "must be >= 5" in str(mistake)  # click( start patch end )
    assert find_cut_off(config(5, policy=pointing)) is None


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"engine": "scripted"}},  # no model writes
        {
            "env": {"suite": "served:tasks.toml"}
        },  # agents of other programs have languages of their own
        {"model": {"path": "absent"}},  # reported as model.path
        {"policy": {"action_parser": "absent.py:ActionParser"}},  # reported as policy.action_parser
    ],
)
def test_where_nothing_tells_nothing_is_refused(sections: dict[str, Any]) -> None:
    assert find_cut_off(config(1, **sections)) is None
