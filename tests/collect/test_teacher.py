"""A teacher's successes are the policy's steps; what goes wrong is counted, and nothing collected is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bus.errors import ExchangeError, UserError
from dart_cli.chat.server import MOST_FAILED
from dart_cli.cli.main import main
from dart_cli.collect import CollectOptions, teacher
from dart_cli.collect.collector import run_collect
from dart_cli.collect.teacher_record import FILE
from dart_cli.config.schema import Config
from dart_cli.data.exchange.parquet_read import read_folder
from dart_cli.data.exchange.parquet_schema import Trajectory
from dart_cli.data.exchange.transfer import import_folder
from dart_cli.data.store.open import open_reader
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import make_action_parser
from dart_cli.language.parsers.several import read_actions, write_actions
from envs.contract.actions import action_from_dict
from tests.chat.chat_server import Raw, Says, chat, message
from tests.own_suites.shelf_suite import ShelfEnv
from tests.waiting import PATIENCE_S

SHELF = "tests.own_suites.shelf_suite:ShelfSuite"
HINTED = CollectOptions(per_task=4, player="teacher", hints=True)
_CALL = re.compile(r"Next: (.*?</tool_call>|.*?```.*?```|Thought:.*?\nAction: [^\n]*|[^\n]*)", re.S)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "BACK_OFF_S", 0.0)


def config_of(tmp_path: Path, url: str = "http://localhost:1/v1", **settings: Any) -> Config:
    """The shelf's clicks; the teacher writes UI-TARS text, the policy is the tiny model."""
    settings = {"policy": {"family": "ui-tars"}, "name": "eyes", "url": url} | settings
    return Config.model_validate(
        {
            "run": {"dir": tmp_path / "run", "seed": 5},
            "env": {"suite": SHELF, "tasks": ["shelf/click"], "slots": 4},
            "policy": {"history_images": 2, "history_turns": 2},
            "rollout": {"max_tokens": 12, "max_batch": 4, "device": "cpu"},
            "teacher": settings,
        }
    )


def with_task(config: Config, name: str) -> Config:
    return config.model_copy(update={"env": config.env.model_copy(update={"tasks": [name]})})


def hint_in(body: dict[str, Any]) -> str:
    """The action that the newest prompt names, in the teacher's language."""
    texts = []
    for sent in body["messages"]:
        if sent["role"] == "user" and isinstance(sent["content"], str):
            texts.append(sent["content"])
        elif sent["role"] == "user":
            texts += [part["text"] for part in sent["content"] if part["type"] == "text"]
    return _CALL.findall("\n".join(texts))[-1]


class Server:
    """Answers each prompt with the action that it names, but for those that `otherwise` answers."""

    def __init__(self, otherwise: Callable[[int], str | int | Raw | None] = lambda _: None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._otherwise = otherwise
        self._lock = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> str | int | Raw:
        with self._lock:
            self.bodies.append(body)
            number = len(self.bodies)
        other = self._otherwise(number)
        return hint_in(body) if other is None else other


def collect(config: Config, says: Says, options: CollectOptions = HINTED) -> Any:
    with chat(says) as url:
        at = config.teacher.model_copy(update={"url": url})
        return run_collect(config.model_copy(update={"teacher": at}), options)


def members(config: Config) -> set[str]:
    """The ids of the pool's members, which are digests of all that a policy would learn."""
    with open_reader(config.run.dir) as reader:
        return {row.trajectory_id for row in reader.pool()}


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


JSON = CollectOptions(per_task=4, player="teacher", hints=True, as_json=True)

# --- what is stored --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["ui-tars", "qwen3-vl", "qwen3.5", "mai-ui", "opencua-qwen2"])
def test_steps_of_any_family_are_byte_for_byte_those_of_the_oracle(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ids hash prompts, screens, tokens, texts and actions, and the oracle writes them itself."""
    server = Server()
    taught = config_of(tmp_path, policy={"family": family})
    collect(taught, server, JSON)
    result = printed(capsys)
    assert (result["collected"], result["missing"]) == (4, 0)
    assert result["teacher"]["requests"] == len(server.bodies) == 12
    solved = taught.model_copy(
        update={"run": taught.run.model_copy(update={"dir": tmp_path / "solved"})}
    )
    run_collect(solved, CollectOptions(per_task=4))
    assert members(taught) == members(solved)
    with open_reader(taught.run.dir) as reader:
        assert {(row.source, row.has_logprobs) for row in reader.pool()} == {("teacher", False)}


def test_a_teacher_reads_its_own_prompt_and_its_own_past(tmp_path: Path) -> None:
    """The system message of its family, its own texts, and as many screens as its family shows."""
    server = Server()
    config = config_of(tmp_path, concurrent=1, temperature=0.5, max_tokens=77)
    collect(config, server, CollectOptions(per_task=1, player="teacher", hints=True))
    first, second, third = server.bodies
    written = [hint_in(body) for body in (first, second)]
    roles = [[sent["role"] for sent in body["messages"]] for body in server.bodies]
    assert roles[0] == ["system", "user", "user"]
    assert roles[2] == ["system", "user", "user", "assistant", "user", "assistant", "user"]
    assert [sent["content"] for sent in third["messages"] if sent["role"] == "assistant"] == [
        make_action_parser("uitars").as_history(text) for text in written
    ]
    images = [
        part["image_url"]["url"]
        for sent in third["messages"]
        if isinstance(sent["content"], list)
        for part in sent["content"]
        if part["type"] == "image_url"
    ]
    assert len(set(images)) == len(images) == 3
    assert {(body["temperature"], body["max_completion_tokens"]) for body in server.bodies} == {
        (0.5, 77)
    }
    assert len({body["seed"] for body in server.bodies}) == 3
    assert "\ufdd0" not in json.dumps(server.bodies)  # marks of our tokenizers


def test_coordinates_are_mapped_from_the_teachers_grid_to_the_policys(tmp_path: Path) -> None:
    def says(body: dict[str, Any]) -> str:
        teachers = make_coordinate_map("thousand", 168, 168)
        action = make_action_parser("uitars").parse(hint_in(body), teachers)
        return make_action_parser("uitars").format(action, teachers, "It is there.")

    config = config_of(tmp_path)
    collect(config, says)
    grid = make_coordinate_map("thousandths", 168, 168)
    with open_reader(config.run.dir) as reader:
        for row in reader.pool():
            for step in reader.steps(row.trajectory_id):
                assert step.action is not None
                x, y = grid.to_model(step.action["x"], step.action["y"])
                assert step.text == f"click({x},{y})"


@pytest.mark.parametrize("keeps", [True, False])
def test_thoughts_are_kept_or_dropped_by_a_key(keeps: bool, tmp_path: Path) -> None:
    """The policy's language has a place for them; its tokens are bytes here."""

    def says(body: dict[str, Any]) -> Raw:
        return message(hint_in(body).replace("Thought: ", "Thought: I see it."), reasoning=why)

    why = ""
    config = config_of(tmp_path, keep_thoughts=keeps)
    changes: dict[str, Any] = {"engine": "scripted", "max_tokens": 200}
    config = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=changes),
            "policy": config.policy.model_copy(update={"action_parser": "uitars"}),
        }
    )
    for why, expected in (("", "I see it."), ("It is on the left.", "I see it.")):
        run = config.run.model_copy(update={"dir": tmp_path / f"run{len(why)}"})
        config = config.model_copy(update={"run": run})
        collect(config, says)
        with open_reader(run.dir) as reader:
            texts = [step.text for row in reader.pool() for step in reader.steps(row.trajectory_id)]
        thoughts = {re.match(r"Thought: (.*)\nAction:", text)[1] for text in texts}  # type: ignore[index]
        assert thoughts == {expected if keeps else ""}


def test_a_teachers_answer_of_several_actions_is_one_step_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the policy's language; or, if that has one action a completion, no step of it."""
    grid, parser = make_coordinate_map("thousand", 168, 168), make_action_parser("uitars", 3)

    def plan(env: ShelfEnv) -> str:
        return f"Next: {write_actions(parser, env._actions[env._done :], grid)}"

    monkeypatch.setattr(ShelfEnv, "oracle_hint", plan, raising=False)

    def says(body: dict[str, Any]) -> str:
        [text] = [
            part["text"] if isinstance(part, dict) else part
            for sent in body["messages"]
            for part in (
                sent["content"] if isinstance(sent["content"], list) else [sent["content"]]
            )
            if "Next: " in str(part)
        ]
        return str(text).partition("Next: ")[2]

    config = config_of(tmp_path, policy={"family": "ui-tars", "max_actions": 3})
    policy = config.policy.model_copy(update={"max_actions": 3})
    rollout = config.rollout.model_copy(update={"max_tokens": 60})
    several = config.model_copy(update={"policy": policy, "rollout": rollout})
    collect(several, says)
    with open_reader(config.run.dir) as reader:
        episodes = [reader.steps(row.trajectory_id) for row in reader.pool()]
    assert len(episodes) == 4
    for [step] in episodes:
        assert len(step.actions) == step.text.count("\n") + 1 == 3
        assert read_actions(
            make_action_parser("compact", 3),
            step.text,
            make_coordinate_map("thousandths", 168, 168),
        ) == [action_from_dict(action) for action in step.actions]
    run = config.run.model_copy(update={"dir": tmp_path / "one"})
    with pytest.raises(UserError, match="no success was collected"):
        collect(config.model_copy(update={"run": run}), says)


# --- what cannot be used -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "answer", "reason"),
    [
        ("shelf/click", "I would press the button.", teacher.MALFORMED),
        ("shelf/click", "<think>So", teacher.MALFORMED),
        ("shelf/click", message("Thought: I", "length"), teacher.CUT_OFF),
        ("shelf/click", message(None, refusal="No."), teacher.REFUSED),
        ("shelf/sideways", None, teacher.UNWRITABLE),
        ("shelf/long", None, teacher.TOO_LONG),
    ],
)
def test_an_answer_that_is_no_step_of_the_policy_is_counted_and_its_seed_not_paid_for_again(
    task: str,
    answer: str | Raw | None,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Server(lambda _: answer)
    config = with_task(config_of(tmp_path), task)
    if task == "shelf/long":  # no hint names it, and the teacher's language has it
        server = Server(lambda n: f"Thought: \nAction: type(content='{'x' * 99}')")
    if task == "shelf/sideways":
        right = "Thought: \nAction: scroll(start_box='(60,60)', direction='right')"
        server = Server(lambda n: right)
    wanted = CollectOptions(per_task=1, player="teacher", hints=True, as_json=True)
    with pytest.raises(UserError, match="no success was collected"):
        collect(config, server, wanted)
    asked = len(server.bodies)
    assert asked == 8  # as many seeds as are tried for one success, a request each
    counts: Counter[str] = Counter()
    for line in (config.run.dir / FILE).read_text().splitlines():
        entry = json.loads(line)
        counts.update([entry["unusable"]] if entry["task"] else [])
    assert counts == printed(capsys)["teacher"]["unusable"] == {reason: 8}
    with pytest.raises(UserError, match="no success was collected"):
        collect(config, server, wanted)
    assert len(server.bodies) == asked


def test_counts_and_costs_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(lambda number: "no action" if number % 4 == 0 else None)
    config = config_of(tmp_path, concurrent=1, price_prompt=3.0, price_answer=15.0)
    collect(config, server, CollectOptions(per_task=2, player="teacher", hints=True))
    shown = capsys.readouterr().out
    asked = len(server.bodies)
    cost = asked * (100 * 3.0 + 7 * 15.0) / 1e6
    assert (
        f"teacher eyes: {asked} requests, {100 * asked:,} tokens of prompts, {7 * asked} of answers, "
        f"cost {cost:.2f}" in " ".join(shown.split())
    )
    assert "unusable episodes: " in shown


# --- servers that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "why"),
    [
        (None, r"start the server, or check teacher\.url"),
        (Raw(401, b"{}"), r"401 .*teacher\.key_env"),
        (Raw(200, b"<html>"), r"page of HTML; check teacher\.url"),
    ],
)
def test_a_server_that_cannot_work_is_refused_before_anything_is_made(
    models: Raw | None, why: str, tmp_path: Path
) -> None:
    with chat(Server(), models=models or Raw()) as url:
        if models is not None:
            with pytest.raises(UserError, match=why):
                run_collect(config_of(tmp_path, url), HINTED)
    if models is None:  # the server has ended
        with pytest.raises(UserError, match=why):
            run_collect(config_of(tmp_path, url), HINTED)
    assert list(tmp_path.iterdir()) == []


def test_rate_limits_and_failures_between_cost_requests_and_no_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {2: Raw(429, b"{}", {"Retry-After": "0"}), 5: 500, 6: Raw(200, b"<html>"), 9: 503}
    server = Server(failures.get)
    collect(config_of(tmp_path, concurrent=1), server, JSON)
    result = printed(capsys)
    assert (result["collected"], result["missing"], result["teacher"]["unusable"]) == (4, 0, {})
    assert result["teacher"]["requests"] == len(server.bodies) == 12 + len(failures)
    assert result["teacher"]["prompt_tokens"] == 1200


def test_a_server_that_goes_away_ends_the_collection_and_the_next_start_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = Server(lambda number: 500 if number > 8 else None)
    config = config_of(tmp_path, concurrent=1)
    with pytest.raises(UserError, match=rf"{MOST_FAILED} questions in a row .*answers 500.* kept"):
        collect(config, dying, CollectOptions(per_task=9, player="teacher", hints=True))
    assert "over all starts" not in capsys.readouterr().out
    before = members(config)
    assert len(before) == 2  # of three steps each
    server = Server()
    options = CollectOptions(per_task=9, player="teacher", hints=True, as_json=True)
    collect(config, server, options)
    result = printed(capsys)
    assert (result["there"], result["collected"], result["missing"]) == (2, 7, 0)
    assert len(server.bodies) == 21
    assert before < members(config)
    assert result["teacher"]["all_starts"]["requests"] == len(dying.bodies) + 21


def test_as_many_questions_are_asked_at_once_as_the_key_says(tmp_path: Path) -> None:
    inside, most, lock = 0, 0, threading.Lock()
    first = threading.Barrier(3, timeout=PATIENCE_S)
    server = Server()

    def says(body: dict[str, Any]) -> str:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            waits = len(server.bodies) < 3
            answer = server(body)
        if waits:
            first.wait()  # only three at once get past this
        with lock:
            inside -= 1
        return str(answer)

    collect(config_of(tmp_path, concurrent=3), says)
    assert most == 3


def test_a_wrong_name_ends_the_collection_at_once(tmp_path: Path) -> None:
    server = Server(lambda _: 404)
    with pytest.raises(UserError, match=r"404 .*check teacher\.url.* and teacher\.name"):
        collect(config_of(tmp_path, concurrent=1), server)
    assert len(server.bodies) == 1


# --- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [{"budget_requests": 8}, {"budget_tokens": 107 * 8}])
def test_a_budget_that_ends_in_the_middle_keeps_what_was_paid_for(
    budget: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    config = config_of(tmp_path, concurrent=1, **budget)
    collect(config, server, JSON)
    result = printed(capsys)
    assert (result["collected"], result["missing"], len(server.bodies)) == (2, 2, 8)
    assert result["teacher"]["budget_spent"] is True
    assert result["teacher"]["unusable"] == {teacher.NO_BUDGET: 1}
    [(key, limit)] = budget.items()
    with pytest.raises(UserError, match=rf"teacher\.{key} = {limit} is spent .*raise it"):
        collect(config, server, JSON)
    assert len(server.bodies) == 8
    more = config.teacher.model_copy(update={key: 10**6})
    collect(config.model_copy(update={"teacher": more}), server, JSON)
    assert printed(capsys)["missing"] == 0
    assert len(server.bodies) == 8 + 2 * 3


def test_a_budget_that_is_just_enough_is_not_cut_short(tmp_path: Path) -> None:
    out = tmp_path / "taught"
    options = CollectOptions(per_task=4, player="teacher", hints=True, out=out)
    collect(config_of(tmp_path, budget_requests=12), Server(), options)
    assert len(list(read_folder(out))) == 4


def test_a_budget_of_tokens_that_nobody_counts_is_refused(tmp_path: Path) -> None:
    def says(body: dict[str, Any]) -> Raw:
        content = {"choices": [{"message": {"content": hint_in(body)}}]}
        return Raw(body=json.dumps(content).encode())

    with pytest.raises(UserError, match=r"budget_tokens cannot be kept.*budget_requests"):
        collect(config_of(tmp_path, budget_tokens=10**6), says)


# --- signals -------------------------------------------------------------------------------------


def test_stopped_by_a_signal_it_keeps_and_prints_what_was_paid_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    over, stopped = threading.Event(), threading.Event()

    def says(body: dict[str, Any]) -> str:
        answer = server(body)
        if len(server.bodies) > 4:  # within the second episode
            stopped.set()
            over.wait(60)
        return str(answer)

    server = Server()
    config = config_of(tmp_path, concurrent=1)
    thread = threading.Thread(
        target=lambda: stopped.wait(60) and os.kill(os.getpid(), signal.SIGTERM)
    )
    thread.start()
    try:
        with pytest.raises(SystemExit) as exit_:
            collect(config, says, JSON)
    finally:
        over.set()
        thread.join(60)
    assert exit_.value.code == 143
    text, said = capsys.readouterr()
    result = json.loads(text)
    assert (result["collected"], result["missing"], result["stopped"]) == (1, 3, True)
    assert "for teacher eyes to answer step 1 of shelf/click#" in said
    assert len(members(config)) == 1


# --- folders -------------------------------------------------------------------------------------


def test_a_folder_is_written_at_the_end_of_all_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "taught"
    options = CollectOptions(per_task=4, player="teacher", hints=True, out=out, as_json=True)
    config = config_of(tmp_path, concurrent=1, budget_requests=8)
    collect(config, Server(), options)
    assert printed(capsys)["into"] == f"{out}.partial"
    assert not out.exists()
    more = config.teacher.model_copy(update={"budget_requests": 0})
    config = config.model_copy(update={"teacher": more})
    collect(config, Server(), options)
    assert printed(capsys)["into"] == str(out)
    assert [path.name for path in tmp_path.iterdir()] == ["taught"]
    trajectories: list[Trajectory] = list(read_folder(out))
    assert {(each.source, each.outcome, len(each.steps)) for each in trajectories} == {
        ("teacher", "pass", 3)
    }
    assert import_folder(config, out).joined == len(trajectories) == 4
    with pytest.raises(ExchangeError, match="exists already"):
        collect(config, Server(), options)


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "teacher.model is empty"),
        (["--set", "teacher.url=http://x/v1", "--set", "teacher.name=a"], "teacher.policy.family"),
        (["--set", "teacher.model=/nowhere"], "teacher.model is no folder"),
        (["--set", "teacher.model=builtin:tiny", "--weights", "w"], "teacher.model"),
        (
            ["--set", "rollout.max_tokens=2", "--set", "teacher.model=builtin:tiny"],
            "shortest click",
        ),
    ],
)
def test_what_is_wrong_with_the_section_is_one_line_before_anything_starts(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nmax_tokens = 12\n')
    with pytest.raises(SystemExit) as stopped:
        main(["data", "collect", str(path), "--from", "teacher", *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert why in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_names_the_teacher_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nmax_tokens = 12\n[teacher]\nname = "eyes"\n'
        'url = "http://localhost:1/v1"\nbudget_requests = 5000\n[teacher.policy]\nfamily = "qwen3-vl"\n'
    )
    with pytest.raises(SystemExit) as stopped:
        main(["data", "collect", str(path), "--from", "teacher", "--dry-run"])
    assert stopped.value.code == 0
    line = "eyes at http://localhost:1/v1, qwen3-vl, at most 8 requests at a time, 5,000 requests"
    assert line in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
