"""A model folder plays for a policy of another family, whose steps are played again by hand and learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bus.errors import ConfigError, UserError
from bus.messages import Turn
from dart_cli.collect import CollectOptions, teacher
from dart_cli.collect.collector import run_collect
from dart_cli.collect.teacher_record import FILE
from dart_cli.config.load import default_config
from dart_cli.config.rules.check import check_config
from dart_cli.config.rules.learning import read_by_tune
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_reader
from dart_cli.env.step_prompts import action_spec_of
from dart_cli.policy.loader import load_policy
from dart_cli.policy.prompt import make_renderer
from dart_cli.tune.tuning import run_tune
from envs.contract.actions import action_from_dict
from envs.contract.registry import find_task, make_env
from scripts.small_models import build

TASKS = ["mini/popup", "mini/page"]


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random folder of the class of UI-TARS-1.5."""
    return build("qwen2_5_vl", tmp_path_factory.mktemp("student") / "ui-tars-1.5")


@pytest.fixture(scope="module")
def taught(student: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The configuration of a run whose pool has what the tiny model played, with hints."""
    keys = {
        "run.dir": tmp_path_factory.mktemp("runs") / "taught",
        "model.path": student,
        "policy.family": "ui-tars-1.5",
        "env.tasks": TASKS,
        "env.slots": 4,
        "rollout.max_tokens": 200,
        "rollout.max_batch": 4,
        "rollout.device": "cpu",
        "teacher.model": "builtin:tiny",
        "teacher.keep_thoughts": "true",
    }
    config = default_config([f"{key}={value}" for key, value in keys.items()])
    check_config(config, None, "env")
    check_config(config, None, "teacher")
    run_collect(config, CollectOptions(per_task=2, player="teacher", hints=True))
    return config


def test_its_steps_are_what_the_policy_would_have_seen_and_written(
    taught: Config, student: Path
) -> None:
    """Played again by hand: the same screens, prompts with the policy's own past, tokens that decode."""
    policy = load_policy(str(student), weights=False)
    renderer, spec, env = (
        make_renderer(policy, taught.policy),
        action_spec_of(taught),
        make_env("mini"),
    )
    with open_reader(taught.run.dir) as reader:
        rows = reader.pool()
        assert sorted(row.task_id for row in rows) == sorted(2 * TASKS)
        for row in rows:
            task = find_task("mini", row.task_id)
            screen, info = env.reset(seed=row.task_seed, options={"task": task})
            past: list[Turn] = []
            pointer: tuple[int, int] | None = None
            for step in reader.steps(row.trajectory_id):
                rendered = renderer.render(str(info["instruction"]), past, screen.screenshot)
                assert step.prompt_token_ids == rendered.token_ids
                assert policy.decode(step.sampled.token_ids) == step.text
                assert step.text.startswith("Thought: \nAction: click(start_box=")
                assert step.sampled.token_ids[-1] in policy.end_token_ids
                [action], _ = spec.read(step.text, screen, pointer)
                assert step.action is not None
                assert action == action_from_dict(step.action)
                shown = spec.action_parser.as_history(step.text)
                past.append(Turn(text=shown, screenshot=screen.screenshot))
                screen, reward, *_ = env.step(action)
            assert reward == 1.0


def test_dart_tune_learns_them(taught: Config, student: Path, tmp_path: Path) -> None:
    keys = {
        "tune.data": f'["{taught.run.dir}"]',
        "tune.trajectories": "pool",
        "tune.out": tmp_path / "model",
        "tune.epochs": 12,
        "tune.batch": 4,
        "tune.lr": 3e-3,
        "model.path": student,
        "policy.family": "ui-tars-1.5",
        "train.device": "cpu",
    }
    config = read_by_tune(default_config([f"{key}={value}" for key, value in keys.items()]))
    check_config(config, None, "tune")
    result = run_tune(config)
    losses = [update["loss"] for update in result.curve]
    assert losses[-1] < 0.5 * losses[0]


def test_a_folder_that_cannot_write_its_language_is_told_before_its_weights_are_read(
    student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vocabulary lacks a character of every call, which the tokenizer then drops silently."""
    folder = build("qwen3_vl", tmp_path / "qwen3-vl")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["{"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    keys = {"teacher.model": folder, "run.dir": tmp_path / "run", "rollout.max_tokens": 12}
    config = default_config([f"{key}={value}" for key, value in keys.items()])
    check_config(config, None, "teacher")
    monkeypatch.setattr(teacher, "loaded_model", None)
    with pytest.raises(
        UserError, match=r"cannot write teacher\.policy\.action_parser = 'toolcall'"
    ):
        run_collect(config, CollectOptions(per_task=1, player="teacher"))


def test_a_prompt_that_the_teacher_cannot_read_is_counted_and_its_seed_not_played_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its answer it needs more positions than the model has."""
    keys = {
        "teacher.model": "builtin:tiny",
        "teacher.max_tokens": 4096,
        "run.dir": tmp_path / "run",
        "rollout.device": "cpu",
        "env.tasks": ["mini/click"],
        "env.slots": 2,
    }
    config = default_config([f"{key}={value}" for key, value in keys.items()])
    options = CollectOptions(per_task=1, player="teacher", as_json=True)
    unusable = []
    for why in (r"cannot read its prompt: .* positions", "has played every seed that is tried"):
        with pytest.raises(UserError, match=why):
            run_collect(config, options)
        result = json.loads(capsys.readouterr().out)
        assert (result["collected"], result["missing"]) == (0, 1)
        unusable.append(result["teacher"]["unusable"])
    assert unusable == [{teacher.UNREADABLE: 8}, {}]
    path = tmp_path / "run" / FILE
    played = [json.loads(line) for line in path.read_text().splitlines()]
    seeds = [line["seed"] for line in played if line.get("outcome")]
    assert len(seeds) == len(set(seeds)) == 8


@pytest.mark.parametrize(
    ("name", "why"),
    [("plain", r"teacher\.policy\.family = \"auto\": .* may be of"), ("gone", "is no folder")],
)
def test_a_folder_that_shows_no_family_is_refused(name: str, why: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    if name == "plain":
        build("qwen3_vl", folder)
    config = default_config([f"teacher.model={folder}"])
    with pytest.raises(ConfigError, match=why):
        check_config(config, None, "teacher")
