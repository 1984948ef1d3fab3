"""A judge's opinion: asked again after failures, read strictly, invalid with the reason where there is none."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bus.errors import ModelError, UserError
from bus.messages import Judgement
from dart_cli.config.schema import JudgeConfig
from dart_cli.judge import judge as judge_module
from dart_cli.judge.evidence import Answer, Evidence, shrunk
from dart_cli.judge.judge import Judge, JudgeLimits, Purpose, name_of
from tests.chat.chat_server import Says, chat
from tests.config.model_parts import write_model
from tests.waiting import PATIENCE_S


def png(number: int, size: tuple[int, int] = (40, 30)) -> bytes:
    into = io.BytesIO()
    Image.new("RGB", size, (number, 0, 0)).save(into, "PNG")
    return into.getvalue()


def evidence(steps: int = 3, images: int = 5) -> Evidence:
    episode = Evidence("close the window", png(0), images)
    for number in range(1, steps + 1):
        episode.add([{"kind": "click", "x": number, "y": 2}], png(number))
    return episode


def ask(says: Says, *, use: Purpose = "missing", attempts: int = 4, **settings: Any) -> Judgement:
    async def run(url: str) -> Judgement:
        config = JudgeConfig(url=url, model="eyes", **settings)
        async with Judge(config, JudgeLimits(attempts=attempts, back_off_s=0.0)) as judge:
            return await judge.judge(evidence(images=config.images), use)

    with chat(says) as url:
        return asyncio.run(run(url))


def test_it_sees_the_task_the_actions_and_the_screens_in_order() -> None:
    bodies: list[dict[str, Any]] = []

    def says(body: dict[str, Any]) -> str:
        bodies.append(body)
        return '{"verdict": "pass", "reason": "the window is gone"}'

    judgement = ask(says, images=3)
    assert (judgement.outcome, judgement.score, judgement.reason) == (
        "pass",
        1.0,
        "the window is gone",
    )
    assert (judgement.calls, judgement.prompt_tokens, judgement.completion_tokens) == (1, 100, 7)
    [body] = bodies
    assert isinstance(body["messages"][0]["content"], str)
    parts = body["messages"][1]["content"]
    assert "close the window" in parts[0]["text"]
    assert '2. click {"x": 2, "y": 2}' in parts[0]["text"]
    titles = [part["text"] for part in parts[1:] if part["type"] == "text"]
    reds = []
    for part in parts:
        if part["type"] == "image_url":
            blob = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            with Image.open(io.BytesIO(blob)) as shown:
                reds.append(shown.getpixel((0, 0))[0])
    assert reds in ([0, 1, 3], [0, 2, 3])
    assert titles[0].startswith("The screen before")
    assert titles[-1] == "The screen at the end, after action 3:"


@pytest.mark.parametrize(
    ("text", "outcome", "score"),
    [
        ('{"score": 1.0, "reason": "all"}', "pass", 1.0),
        ('{"score": 0.5}', "fail", 0.5),
        ('```json\n{"score": 1}\n```', "pass", 1.0),
    ],
)
def test_a_score_passes_where_it_is_whole(text: str, outcome: str, score: float) -> None:
    judgement = ask(lambda _: text, answer="score")
    assert (judgement.outcome, judgement.score) == (outcome, score)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("It passes.", "not JSON alone"),
        ('Sure: {"verdict": "pass"}', "not JSON alone"),
        ('["pass"]', "not a JSON object"),
        ('{"score": 1}', 'no "verdict"'),
        ('{"verdict": "passed"}', "neither"),
        ('{"verdict": true}', "neither"),
        ('{"verdict": "fail", "verdict": "pass"}', "twice"),
        ('{"verdict": "pass", "sure": 1}', '"sure"'),
        ('{"verdict": "pass", "reason": 3}', "not a text"),
        ("[" * 100_000, "not JSON alone"),
        ('<think>It is {"verdict": "pass"}', "its thought does not end"),
        ('<think>a</think>b</think>{"verdict": "pass"}', "not JSON alone"),
        ('{"verdict": "pass"}</think>{"verdict": "maybe"}', "neither"),
    ],
)
def test_what_is_no_answer_is_asked_once_more_and_then_invalid(text: str, problem: str) -> None:
    calls: list[int] = []

    def says(body: dict[str, Any]) -> str:
        calls.append(len(body["messages"]))
        return text

    judgement = ask(says)
    assert (judgement.outcome, judgement.score, judgement.calls) == ("invalid", None, 2)
    assert problem in judgement.reason
    assert calls == [2, 4]  # the second time with its answer and what was wrong with it


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<think>\nIt shows {"verdict": "pass"}.\n</think>\n\n{"verdict": "fail"}', ""),
        ('The end shows it.\n</think>\n```json\n{"verdict": "fail"}\n```', ""),
        ('{"verdict": "pass"}? No.</think>{"verdict": "fail"}', ""),
        ('{"verdict": "fail", "reason": "it says </think>"}', "it says </think>"),
    ],
)
def test_a_judges_thought_is_taken_off(text: str, reason: str) -> None:
    judgement = ask(lambda _: text)
    assert (judgement.outcome, judgement.calls, judgement.reason) == ("fail", 1, reason)


def test_a_judge_is_shown_its_answer_without_its_thought() -> None:
    shown: list[Any] = []

    def says(body: dict[str, Any]) -> str:
        shown.append(body["messages"][-2])
        return f"<think>{'why ' * 1000}</think>It passes."

    ask(says)
    assert "It passes." in str(shown[1])
    assert "why" not in str(shown[1])


@pytest.mark.parametrize(
    "text", ['{"score": 1.5}', '{"score": NaN}', '{"score": true}', '{"score": "1"}']
)
def test_what_is_no_score_is_invalid(text: str) -> None:
    assert ask(lambda _: text, answer="score").outcome == "invalid"


def test_an_answer_to_the_second_question_counts() -> None:
    answers = iter(["no idea", '{"verdict": "fail"}'])
    judgement = ask(lambda _: next(answers))
    assert (judgement.outcome, judgement.score, judgement.calls, judgement.completion_tokens) == (
        "fail",
        0.0,
        2,
        14,
    )


def test_failures_are_retried_and_at_last_the_reason() -> None:
    statuses = iter([500, 503, '{"verdict": "pass"}'])
    assert ask(lambda _: next(statuses)).calls == 3
    judgement = ask(lambda _: 500, attempts=2)
    assert (judgement.outcome, judgement.calls) == ("invalid", 2)
    assert "answers 500" in judgement.reason


def test_a_wrong_key_is_the_users_to_mend() -> None:
    with pytest.raises(UserError, match=r"401 .*env\.judge\.key_env"):
        ask(lambda _: 401)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"answer_s": 0.05, "attempts": 1}, "no answer in 0.05 s"), ({"deadline_s": 0.05}, "0.05 s")],
)
def test_a_late_answer_is_none(settings: dict[str, Any], reason: str) -> None:
    over = threading.Event()

    def says(_: dict[str, Any]) -> str:
        over.wait(60)
        return '{"verdict": "pass"}'

    async def run(url: str) -> Judgement:
        try:
            judge = Judge(JudgeConfig(url=url, model="eyes"), JudgeLimits(**settings))
            return await judge.judge(evidence(), "missing")
        finally:
            over.set()

    with chat(says) as url:
        judgement = asyncio.run(run(url))
    assert judgement.outcome == "invalid"
    assert reason in judgement.reason


def test_no_more_episodes_are_judged_at_once_than_its_limit() -> None:
    inside, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def says(_: dict[str, Any]) -> str:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        both.wait()  # only two at once get past this
        with lock:
            inside -= 1
        return '{"verdict": "pass"}'

    async def run(url: str) -> None:
        judge = Judge(JudgeConfig(url=url, model="eyes"), JudgeLimits(concurrent=2))
        judgement = await asyncio.gather(*(judge.judge(evidence(), "check") for _ in range(6)))
        assert {each.outcome for each in judgement} == {"pass"}

    with chat(says) as url:
        asyncio.run(run(url))
    assert most == 2


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 37, 1000])
@pytest.mark.parametrize("images", [2, 3, 5])
def test_the_first_and_the_last_screen_are_shown_and_others_evenly(steps: int, images: int) -> None:
    episode = evidence(steps, images)
    shown = [Image.open(io.BytesIO(screen)).getpixel((0, 0))[0] for _, screen in episode.screens()]
    assert len(shown) == min(images, steps + 1)
    assert len(episode._between) <= 2 * images  # memory is bounded however long the episode is
    numbers = [0, *(number for number, *_ in episode._between), steps]
    assert shown[0] == 0
    assert shown[-1] == steps % 256 if steps < 256 else True
    assert numbers == sorted(numbers)
    assert len(episode.actions) == steps


def test_large_screens_are_made_smaller() -> None:
    with Image.open(io.BytesIO(shrunk(png(9, (400, 100)), 100))) as small:
        assert small.size == (100, 25)
    assert shrunk(png(9), 64) == png(9)


def test_another_way_of_asking_is_another_judge() -> None:
    config = JudgeConfig(url="http://host/v1", model="eyes")
    assert name_of(config) == name_of(
        config.model_copy(update={"use": "check", "url": "http://b/v1"})
    )
    assert name_of(config) != name_of(config.model_copy(update={"images": 2}))
    assert name_of(config).startswith("eyes#")


def test_a_folder_with_other_tensors_is_another_judge_wherever_it_lies(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a" / "eyes")
    copied = Path(shutil.copytree(folder, tmp_path / "b" / "eyes"))

    def name(place: Path) -> str:
        judge = Judge(JudgeConfig(model=str(place)))
        judge.read_folder()
        return judge.name

    before = name(folder)
    assert before == name(copied)
    assert before.startswith("eyes#")
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert name(copied) != before
    assert name(folder) == before


async def test_a_folder_is_read_once_before_its_first_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def digest(folder: Path) -> str:
        reads.append(folder)
        return "0123"

    async def answer(*_: object) -> Answer:
        return Answer(1.0, "done")

    monkeypatch.setattr(judge_module, "folder_digest", digest)
    monkeypatch.setattr(Judge, "_answer", answer)
    config = JudgeConfig(model=str(tmp_path))
    judge = Judge(config)
    opinions = await asyncio.gather(*(judge.judge(evidence(), "missing") for _ in range(3)))
    assert {each.judge for each in opinions} == {name_of(config, "0123")}
    assert reads == [tmp_path]


async def test_a_folder_that_cannot_be_read_in_time_is_told_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def digest(_: Path) -> str:
        released.wait(PATIENCE_S)
        return ""

    monkeypatch.setattr(judge_module, "folder_digest", digest)
    judge = Judge(JudgeConfig(model=str(tmp_path)), JudgeLimits(deadline_s=0.01))
    with pytest.raises(ModelError, match=r"was not read in 0\.01 s; copy it to a disk"):
        await judge.judge(evidence(), "missing")
    released.set()


def test_the_judge_is_shown_a_transparent_screenshot_on_white() -> None:
    into = io.BytesIO()
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(into, "PNG")
    with Image.open(io.BytesIO(shrunk(into.getvalue(), 64))) as shown:
        assert (shown.mode, shown.getpixel((1, 1))) == ("RGB", (255, 255, 255))
