"""Episodes that others played: rows as they are read, asked and learned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bus.errors import UserError
from dart_cli.config.schema import Config
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.tune.data import ActionData, read_data
from dart_cli.tune.episodes import EPISODES, ActionExamples, read_episodes
from envs.contract.actions import Click, Done

Tune = Callable[..., Any]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with two screenshots."""
    folder = tmp_path / "set"
    folder.mkdir()
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (168, 168), colour).save(folder / name)
    return folder


def episode(**changes: Any) -> dict[str, Any]:
    steps = [
        {"image": "a.png", "action": {"kind": "click", "x": 84, "y": 42}, "thought": "I open it."},
        {"image": "b.png", "action": {"kind": "done"}},
    ]
    return {"instruction": "open the menu", "steps": steps} | changes


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / EPISODES).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_other_pictures_of_the_same_names_are_other_data_and_another_place_is_not(
    home: Path,
) -> None:
    def digest(folder: Path) -> str:
        data = read_data(Config.model_validate({"tune": {"data": [str(write(folder, episode()))]}}))
        return data.digest

    before = digest(home)
    shutil.copytree(home, home.parent / "moved")
    assert digest(home.parent / "moved") == before
    Image.new("RGB", (168, 168), "lime").save(home / "b.png")
    assert digest(home) != before


def test_a_row_is_an_episode_and_a_wrong_step_is_not_learned(home: Path) -> None:
    wrong = episode()
    wrong["steps"][0]["learned"] = False
    first, other = read_episodes(write(home, episode(), wrong))
    assert [step.actions for step in first.steps] == [(Click(x=84, y=42),), (Done(),)]
    assert first.steps[0].thought == "I open it."
    assert [step.learned for step in other.steps] == [False, True]


def test_several_actions_of_a_step_are_one_answer_and_need_a_policy_that_writes_them(
    policy: LoadedPolicy, home: Path
) -> None:
    several = episode()
    several["steps"][0]["more_actions"] = [{"kind": "keypress", "keys": ["enter"]}]

    def examples(most: int) -> ActionExamples:
        data = read_data(Config.model_validate({"tune": {"data": [str(write(home, several))]}}))
        assert isinstance(data, ActionData)
        config = Config.model_validate({"policy": {"history_turns": 1, "max_actions": most}})
        return ActionExamples(policy, config, data.demonstrations)

    first, second = (examples(2).of(index) for index in range(2))
    assert policy.decode(first.answer) == "click(502,252)\nkey(enter)"
    assert "click(502,252)\nkey(enter)" in policy.decode(second.prompt.token_ids)
    with pytest.raises(UserError, match=r"step 0: .*2 actions, but policy.max_actions = 1"):
        examples(1)
    before = read_data(Config.model_validate({"tune": {"data": [str(write(home, several))]}}))
    after = read_data(Config.model_validate({"tune": {"data": [str(write(home, episode()))]}}))
    assert before.digest != after.digest


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (episode(instruction=""), r"episodes.jsonl\[1\]: instruction: .*; correct the file"),
        (episode(steps=[]), r"episodes.jsonl\[1\]: steps: "),
        (
            episode(steps=[{"image": "a.png", "action": {"kind": "tap"}}]),
            r"\[1\]: steps.0.action: .*'tap'",
        ),
        (
            episode(steps=[{"image": "../../etc/passwd", "action": {"kind": "done"}}]),
            "leads out of the set's folder",
        ),
        (episode(steps=[{"image": "c.png", "action": {"kind": "done"}}]), "no picture c.png"),
    ],
)
def test_a_malformed_row_is_told_by_its_place(
    home: Path, row: dict[str, Any], message: str
) -> None:
    config = Config.model_validate({"tune": {"data": [str(write(home, episode(), row))]}})
    with pytest.raises(UserError, match=message):
        read_data(config)


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    return load_policy("builtin:tiny")


def test_a_step_is_asked_with_its_past_and_answered_in_the_action_parsers_words(
    policy: LoadedPolicy, home: Path
) -> None:
    data = read_data(Config.model_validate({"tune": {"data": [str(write(home, episode()))]}}))
    assert isinstance(data, ActionData)
    config = Config.model_validate({"policy": {"history_turns": 1, "history_images": 2}})
    examples = ActionExamples(policy, config, data.demonstrations)
    first, second = (examples.of(index) for index in range(2))
    assert policy.decode(first.answer) == "click(502,252)"
    assert policy.decode(second.answer) == "done()"
    assert (len(first.prompt.images), len(second.prompt.images)) == (1, 2)
    assert "click(502,252)" in policy.decode(second.prompt.token_ids)
    assert "click(502,252)" not in policy.decode(first.prompt.token_ids)
    alone = ActionExamples(policy, Config(), data.demonstrations).of(1)
    assert len(alone.prompt.images) == 1


def test_demonstrations_are_trained_on(
    tune: Tune, home: Path, tmp_path: Path, pointer_folder: Callable[[str], Path]
) -> None:
    write(home, *(episode() for _ in range(3)))
    keys = {"tune.data": [str(home)], "tune.out": tmp_path / "out", "tune.batch": 3}
    result = tune(keys | {"tune.epochs": 4.0, "tune.lr": 1e-3})
    assert (result.examples, result.updates) == (6, 8)
    assert result.curve[-1]["lm"] < result.curve[0]["lm"]
    pointing = {"model.path": str(pointer_folder("builtin:tiny")), "policy.pointing": "pointer"}
    with pytest.raises(UserError, match=r"pointing.*demonstrations"):
        tune(keys | pointing | {"tune.out": tmp_path / "other"})
