"""Promises of `dart serve --model`: one model answers any OpenAI client, without a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dart_cli.cli.main import main
from dart_cli.config.schema import Config
from dart_cli.serve.sessions import action_language
from tests.env.parts import Says
from tests.serve.parts import endpoint, first
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def chat(**fields: object) -> dict[str, object]:
    return {"model": "any", "messages": first(), **fields}


async def test_a_request_needs_no_session_and_leaves_none_open() -> None:
    async with endpoint(Says("click(1,2)"), alone=True, sessions=2) as there:
        for user in ("one", "one", "two", "three"):
            said = await there.call("POST", "/v1/chat/completions", chat(user=user))
            assert (said.status, said.content) == (200, "click(1,2)")
        assert len(there.sessions) == 0
        assert there.data.requests == there.data.steps == []


async def test_a_request_of_a_run_says_which_episode_it_is() -> None:
    async with endpoint(Says("click(1,2)")) as there:
        said = await there.call("POST", "/v1/chat/completions", chat())
        assert (said.status, said.code) == (400, "no_session")


async def test_completions_without_a_seed_are_drawn_anew() -> None:
    policy = Says("click(1,2)")
    async with endpoint(policy, alone=True) as there:
        for seed in ({}, {}, {"seed": 5}, {"seed": 5}):
            await there.call("POST", "/v1/chat/completions", chat(**seed))
        seeds = [request.sampling.seed for request in policy.requests]
        assert seeds[0] != seeds[1]
        assert seeds[2:] == [5, 5]


async def test_an_agent_of_sessions_plays_as_in_a_run_and_nothing_is_filed() -> None:
    async with endpoint(Says("click(1,2)"), alone=True) as there:
        session = await there.open(task="of/another/program")
        assert (await there.chat(session, first())).content == "click(1,2)"
        end_reply = await there.end(session, reward=1)
        assert (end_reply.status, end_reply.body["outcome"], end_reply.body["train"]) == (
            200,
            "pass",
            False,
        )
        assert there.data.requests == there.data.ends == []


@pytest.mark.parametrize("alone", [True, False])
async def test_an_agent_is_told_how_actions_are_written(alone: bool) -> None:
    async with endpoint(Says("click(1,2)"), alone=alone) as there:
        listed = await there.call("GET", "/v1/models")
        [model] = listed.body["data"]
        assert model["dart"] == {"action_parser": "compact", "coordinates": "thousandths"}
        said = await there.call("POST", "/v1/chat/completions", chat(user="an-episode"))
        assert said.body["dart"].items() >= model["dart"].items()


def test_an_agent_is_told_how_many_actions_a_completion_may_have() -> None:
    config = Config.model_validate({"policy": {"max_actions": 3}})
    assert action_language(config) == {
        "action_parser": "compact",
        "coordinates": "thousandths",
        "max_actions": 3,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the TOML file of a run, or a model with --model FOLDER"),
        (["--model", "absent"], "--model is no folder: absent"),
        (["--model", "builtin:tiny", "--worker", "a"], "--worker means nothing beside --model"),
        (["--model", "builtin:tiny", "--set", "rollout.engine=scripted"], "has no model; use"),
        (
            [str(ROOT / "configs/quickstart.toml"), "--model", "2024"],
            "model.path is no folder: 2024",
        ),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_mistake_is_one_line_before_anything_is_loaded(
    arguments: list[str], message: str, dry: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end_reply:
        main(["serve", *arguments, *dry])
    said = capsys.readouterr().err
    assert (end_reply.value.code, said.count("\n")) == (2, 1)
    assert message in said


def test_the_process_serves_a_folder_until_a_signal_ends_it(tmp_path: Path) -> None:
    serving = subprocess.Popen(
        [sys.executable, "-m", "dart_cli", "serve", "--model", "builtin:tiny", "--port", "0"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    with serving:
        assert serving.stderr is not None
        assert serving.stderr.readline() == "loading builtin:tiny\n"
        while not (line := serving.stderr.readline()).startswith("builtin:tiny: "):
            assert line.startswith("progress: has waited"), line
        base = line.strip().removeprefix("builtin:tiny: ")
        body = json.dumps(chat(temperature=0, max_tokens=4, return_token_ids=True)).encode()
        asked = urllib.request.Request(
            f"{base}/chat/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            said = json.load(answer)
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(PATIENCE_S) == 0
        assert serving.stderr.read() == "stopped by SIGTERM\n"
    assert 1 <= len(said["dart"]["token_ids"]) <= 4
    assert list(tmp_path.iterdir()) == [], "a model alone needs no run"
