"""A judge after the run: shown what it would have been shown, resumed where it ended, counted beside the evaluators."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from PIL import Image

from bus.errors import EngineError, UserError
from bus.messages import Judgement
from dart_cli.cli.main import main
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.evaluation.judging import JudgeOptions, judge_run
from dart_cli.judge.judge import JudgeLimits
from tests.chat.chat_server import Says, chat
from tests.data import parts
from tests.data.parts import Clock, make_ledger, play_group, small_config

PASS, FAIL = '{"verdict": "pass", "reason": "it is done"}', '{"verdict": "fail"}'


@pytest.fixture(autouse=True)
def real_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Screenshots that can be looked at, each another one."""

    def picture(*of: object) -> bytes:
        number = crc32(repr(of).encode())
        into = io.BytesIO()
        Image.new("RGB", (8, 8), (number % 256, number // 256 % 256, number // 65536 % 256)).save(
            into, "PNG"
        )
        return into.getvalue()

    monkeypatch.setattr(parts, "picture", picture)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Four trajectories: pass, fail, fail, pass."""
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        play_group(make_ledger(config, store, Clock()), ["pass", "fail", "fail", "pass"], steps=3)
        store.commit()
    return Path(config.run.dir)


def judged(run_dir: Path, says: Says, **options: Any) -> dict[str, Any]:
    with chat(says) as url:
        given, limits = {"url": url, "model": "eyes"}, JudgeLimits(attempts=1, concurrent=1)
        return judge_run(JudgeOptions(run_dir, given, limits=limits, **options))


def test_opinions_are_kept_and_counted_beside_the_evaluators(run_dir: Path) -> None:
    answers = iter([PASS, PASS, FAIL, FAIL])
    told = judged(run_dir, lambda _: next(answers))
    found = told["agreement"]
    assert (found["both_pass"], found["judge_alone"]) == (1, 1)
    assert (found["both_fail"], found["evaluator_alone"]) == (1, 1)
    assert (found["n"], found["kappa"], found["calls"]) == (4, 0.0, 4)
    assert found["prompt_tokens"] == 400
    with open_reader(run_dir) as reader:
        first = reader.trajectories()[0]
        [row] = reader.judgements(first.id)
    assert (first.outcome, row.use, row.outcome, row.reason) == (
        "pass",
        "later",
        "pass",
        "it is done",
    )


def test_a_second_start_goes_on_where_the_first_ended(run_dir: Path) -> None:
    answers = iter([PASS, PASS])
    with pytest.raises(UserError, match="401"):
        judged(run_dir, lambda _: next(answers, 401))
    asked: list[int] = []
    told = judged(run_dir, lambda _: asked.append(1) or FAIL)  # type: ignore[func-returns-value]
    assert (told["asked"], told["before"], len(asked)) == (2, 2, 2)
    assert told["agreement"]["n"] == 4
    assert judged(run_dir, lambda _: 500)["asked"] == 0


def test_stopped_by_a_signal_it_tells_what_was_judged_and_goes_on_from_there(run_dir: Path) -> None:
    asked: list[int] = []
    held = threading.Event()

    def says(_: object) -> str:
        asked.append(1)
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            held.wait()
        return PASS

    try:
        told = judged(run_dir, says)
    finally:
        held.set()
    assert (told["asked"], told["stopped"]) == (2, 143)
    assert told["agreement"]["n"] == 2
    assert judged(run_dir, lambda _: PASS)["before"] == 2


def test_what_had_no_answer_is_asked_about_again(run_dir: Path) -> None:
    told = judged(run_dir, lambda _: "no idea")
    assert (told["agreement"]["unanswered"], told["agreement"]["n"]) == (4, 0)
    assert judged(run_dir, lambda _: PASS)["asked"] == 4


def test_a_dead_server_ends_it(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", group_size=12)
    with open_store(config.run.dir) as store:
        play_group(make_ledger(config, store, Clock()), ["pass"] * 12)
        store.commit()
    asked: list[int] = []
    with pytest.raises(EngineError, match="10 trajectories in a row"):
        judged(Path(config.run.dir), lambda _: asked.append(1) or 503)  # type: ignore[func-returns-value]
    assert len(asked) == 10


def test_a_verdict_of_a_judge_is_no_evaluators(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        first = store.trajectories()[0]
        said = Judgement(judge="other#1", use="missing", outcome="pass", score=1.0)
        store.add_judgement(first.id, said, 0.0)
        store.commit()
    told = judged(run_dir, lambda _: PASS)
    assert told["agreement"]["judged"] == 4
    assert told["agreement"]["n"] == 3
    with open_reader(run_dir) as reader:
        [_, other] = reader.judge_views()
    assert (other.judge, other.verdicts, other.judged) == ("other#1", {"pass": 1}, 1)


def test_mistakes_are_told_before_anything_is_asked(run_dir: Path) -> None:
    for given, said in (
        ({}, r"env\.judge\.model is empty"),
        ({"model": "eyes", "url": "host"}, r"env\.judge\.url must be a base URL"),
        ({"model": "eyes", "url": "http://host/v1", "images": 1}, r"env\.judge\.images"),
        ({"model": "eyes", "url": "http://host/v1", "imges": 9}, r"env\.judge\.imges"),
    ):
        with pytest.raises(UserError, match=said):
            judge_run(JudgeOptions(run_dir, given))
    with pytest.raises(UserError, match="no task mini/nothing"):
        judged(run_dir, lambda _: PASS, tasks=["mini/nothing"])


def test_it_is_told_on_the_command_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(["data", *map(str, arguments)])
        assert not exit_.value.code
        return capsys.readouterr().out

    with chat(lambda _: FAIL) as url:
        out = call("judge", run_dir, "--url", url, "--model", "eyes", "--set", "images=2")
    told = json.loads(out.splitlines()[-1])
    assert told["agreement"]["both_fail"] == told["agreement"]["evaluator_alone"] == 2
    assert "agree 0.50" in call("stats", run_dir).replace("\n", " ")
    with open_reader(run_dir) as reader:
        name = reader.trajectories()[0].id
    shown = " ".join(call("show", name, "--run", run_dir).split())
    assert f"judge {told['judge']} (later): fail" in shown


def test_a_run_in_use_is_left_alone(run_dir: Path) -> None:
    with open_store(run_dir), pytest.raises(UserError, match="in use"):
        judged(run_dir, lambda _: PASS)
