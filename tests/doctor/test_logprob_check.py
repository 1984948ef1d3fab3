"""`dart doctor --parity` reports whether engine and trainer compute the same distribution."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from bus.messages import Turn
from dart_cli.config.schema import Config
from dart_cli.doctor.logprob_check import (
    MOST_SCREENS,
    RunPrompts,
    check_logprobs,
    compare_with_limit,
    draw,
)
from dart_cli.policy.loader import load_policy
from dart_cli.runtime.findings import is_healthy
from dart_cli.train.logprob_check import LIMITS, ComparedTokens
from tests.doctor.parts import doctor

Family = Callable[[str], Path]


def compared(several_off: float) -> ComparedTokens:
    """40 tokens of each kind of prompt; those of several screens are off by `several_off` nats."""
    engine = np.full(120, -2.0)
    trainer = engine + np.repeat([0.0, 1e-6, several_off], 40)
    kinds = np.repeat([0, 1, 2], 40)
    steps = [f"step {kind} of t" for kind in range(3)]
    return ComparedTokens.of(
        engine, trainer, np.zeros(120), kinds, kinds, np.tile(np.arange(40), 3), steps
    )


def test_a_model_folder_is_compared_and_agrees(
    family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    """On small screens, and on as many of the run's own size as its history shows."""
    folder = family("qwen3_vl")
    sets = ["rollout.max_tokens=8", "env.options={size = [560, 308]}"]
    sets += ["policy.history_images=3", "policy.history_turns=4"]
    options = [part for each in sets for part in ("--set", each)]
    assert doctor(folder, "--parity", "--json", *options) == 0
    result = json.loads(capsys.readouterr().out)
    lines = [each["text"] for each in result["findings"] if each["subject"] == "parity"]
    assert len(lines) == 6
    kinds = ("no screen", "one screen", "several screens", "run's screens")
    for line, kind in zip(lines[1:5], kinds, strict=True):
        assert line.startswith(kind)
    images = load_policy(folder, weights=False).images
    tokens = 3 * images.token_count(draw(Random(0), 560, 308))
    visible = re.search(r"; 560x308, up to 3 in a prompt, of up to (\d+) tokens$", lines[4])
    assert visible, lines[4]
    assert tokens < int(visible[1]) < tokens + 150
    assert "within 0.001 nats" in lines[-1]
    assert "tasks" not in {each["subject"] for each in result["findings"]}


def test_pointers_are_compared_on_prompts_with_a_screen(
    pointer_folder: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["rollout.max_tokens=8", "policy.pointing=pointer", "rollout.temperature=1.5"]
    folder = pointer_folder("qwen3_vl")
    options = [part for each in sets for part in ("--set", each)]
    assert doctor(folder, "--parity", "--json", *options) == 0
    result = json.loads(capsys.readouterr().out)
    lines = [each["text"] for each in result["findings"] if each["subject"] == "parity"]
    kinds = [line.partition("  ")[0] for line in lines[1:4]]
    assert kinds == ["one screen", "several screens", "run's screens"]
    assert "within 0.001 nats" in lines[-1]


def test_an_engine_that_gives_other_numbers_exits_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit below the rounding error makes any engine look wrong."""
    monkeypatch.setitem(LIMITS, torch.bfloat16, 1e-12)
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nmax_tokens = 8\n[model]\ndtype = "bfloat16"\n'
    )
    assert doctor(path, "--parity") == 1
    out = capsys.readouterr().out
    assert "engine and trainer disagree" in out
    assert "1e-12" in out
    assert "Likely" in out


def test_the_kind_of_prompt_that_disagrees_is_named() -> None:
    *lines, verdict = compare_with_limit(compared(0.2), 1e-3)
    assert [line.level for line in lines] == ["ok", "ok", "warning"]
    assert lines[2].text.startswith("several screens")
    assert verdict.level == "error"
    assert "One screen agrees" in verdict.cure
    assert is_healthy(compare_with_limit(compared(1e-6), 1e-3))


def test_prompts_of_the_run_s_size_alone_are_judged_apart() -> None:
    """Small prompts say nothing of those that an engine reads in parts."""
    large = compared(0.2).only(np.arange(120) >= 80)
    *lines, verdict = compare_with_limit(compared(1e-6), 1e-3, large, "1920x1080")
    assert [line.level for line in lines] == ["ok", "ok", "ok", "warning"]
    assert lines[-1].text.startswith("run's screens")
    assert lines[-1].text.endswith("; 1920x1080")
    assert verdict.level == "error"
    assert "run's screens alone" in verdict.text
    assert "step 2 of t" in verdict.text
    assert "enable_chunked_prefill" in verdict.cure
    assert is_healthy(compare_with_limit(compared(1e-6), 1e-3, compared(1e-6)))


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ({}, [1, 1]),
        ({"history_images": 5, "history_turns": 35}, [1, 2, 3, 4, 5, 5]),
        ({"history_images": 5, "history_turns": 2}, [1, 2, 3, 3]),  # turns bring their screens
        (
            {"history_images": 3, "history_images_most": 7, "history_turns": 35},
            [1, 2, 3, 4, 5, 6, 7, 3],
        ),
        ({"history_images": 32, "history_turns": 35}, [*range(1, MOST_SCREENS + 1)]),
    ],
)
def test_prompts_of_the_run_grow_until_they_are_full_and_one_screen_is_dropped(
    policy: dict[str, int], shown: list[int]
) -> None:
    env = {"suite": "mini", "options": {"size": "1280x720"}}
    run = RunPrompts.of(Config.model_validate({"policy": policy, "env": env}))
    assert (run.width, run.height, run.steps) == (1280, 720, len(shown))
    turns = [Turn(text="", screenshot=b"") for _ in shown]
    past = [run.history.visible(turns[:step]) for step in range(run.steps)]
    assert [1 + sum(turn.screenshot is not None for turn in each) for each in past] == shown


def test_without_a_size_the_screens_are_the_suite_s() -> None:
    run = RunPrompts.of(Config.model_validate({"env": {"suite": "osworld"}}))
    assert (run.width, run.height) == (1920, 1080)


def test_a_folder_of_another_class_is_an_error_with_the_classes_that_load(
    family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(family("qwen2_vl"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llava"}))
    assert doctor(folder, "--parity") == 1
    assert capsys.readouterr().out.count("model_type is llava, which dart does not load") == 1


def test_without_a_model_there_is_nothing_to_compare() -> None:
    [finding] = check_logprobs(Config.model_validate({"rollout": {"engine": "scripted"}}))
    assert finding.level == "warning"
    assert "rollout.engine" in finding.cure


def test_parity_needs_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--parity") == 2
    assert "--parity needs a run; add its TOML file" in capsys.readouterr().err


def test_a_model_folder_has_no_tasks_to_play(
    family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(family("qwen3_vl"), "--play") == 2
    assert "is a model folder" in capsys.readouterr().err
