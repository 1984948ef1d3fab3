"""An environment that raises, exits, hangs or answers nonsense costs its episode, not its process."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bus.errors import EnvError
from dart_cli.env import calls
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.carriers import MOST_HUNG
from dart_cli.env.episode import play_episode
from envs.contract.actions import Action, Click, Done
from envs.contract.base import Observation, Task, Verdict
from tests.env.parts import Memory, Says, action_spec, lease, threaded
from tests.env.unruly_suite import SCREEN, Unruly, UnrulySuite


class Instructed(Unruly):
    """Well, but for the info that its reset gives."""

    def __init__(self, info: dict[str, Any]) -> None:
        super().__init__()
        self.info = info

    def reset(self, **options: Any) -> tuple[Observation, dict[str, Any]]:
        return super().reset(**options)[0], self.info


def task(kind: str) -> Task:
    return UnrulySuite.tasks[f"unruly/{kind}"]


async def play(player: AsyncEnv, kind: str, *texts: str) -> tuple[str, str, str]:
    """(outcome, stop reason, reason) of one episode; by default the click that passes."""
    end = await play_episode(
        player, lease(), task(kind), Says(*(texts or ("click(30,30)",))), Memory(), action_spec()
    )
    return end.outcome, end.stop_reason, end.reason


@pytest.mark.parametrize("where", ["reset", "step", "evaluate"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "ZeroDivisionError: a bug of the environment"),
        ("exit", "SystemExit: 3"),
        ("stop", "StopIteration"),
        ("none", "None"),
        ("hang", "no answer"),
    ],
)
async def test_whatever_an_environment_does_its_episode_is_invalid_and_the_next_one_is_played(
    where: str, how: str, message: str
) -> None:
    player = threaded(Unruly, deadline_s=1.0 if how == "hang" else 20.0)
    outcome, stop, reason = await play(player, f"{where}-{how}")
    assert (outcome, stop) == ("invalid", "environment")
    assert message in reason
    assert where in reason
    await player.renew()
    assert (await play(player, "well"))[0] == "pass"
    await player.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"screenshot": bytearray(SCREEN.screenshot)}, "screenshot must be bytes, got bytearray"),
        ({"media_type": None}, "media_type must be str, got NoneType"),
        ({"width": np.int64(32)}, "width must be int, got int64"),
        ({"height": True}, "height must be int, got bool"),
        ({"height": 0}, "32x0 pixels"),
        ({"screenshot": b"xx"}, "a screenshot of 2 bytes is no PNG, JPEG or WebP image"),
        ({"screenshot": SCREEN.screenshot[:20]}, "screenshot"),
        ({"width": 64}, "64x32 pixels, its screenshot has 32x32"),
    ],
)
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_a_screen_of_other_types_makes_its_episode_invalid_and_names_them(
    where: str, wrong: dict[str, Any], message: str
) -> None:
    screen = replace(SCREEN, **wrong)

    class Wrong(Unruly):
        def reset(self, **options: Any) -> tuple[Observation, dict[str, Any]]:
            observation, info = super().reset(**options)
            return screen if where == "reset" else observation, info

        def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
            return screen, *super().step(action)[1:]

    player = threaded(Wrong)
    outcome, stop, reason = await play(player, "well")
    assert (outcome, stop) == ("invalid", "environment")
    assert where in reason
    assert message in reason
    await player.close()


@pytest.mark.parametrize("encoding", ["JPEG", "WEBP", "PNG"])
async def test_a_screen_of_any_encoding_that_the_policy_reads_is_played(encoding: str) -> None:
    encoded = io.BytesIO()
    Image.new("RGB", (32, 32), "white").save(encoded, encoding)
    screen = Observation(encoded.getvalue(), f"image/{encoding.lower()}", 32, 32)

    class Other(Unruly):
        def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
            return screen, *super().step(action)[1:]

    player = threaded(Other)
    assert (await play(player, "well"))[0] == "pass"
    await player.close()


@pytest.mark.parametrize(
    ("template", "info", "instruction"),
    [
        ("click", {}, "click"),
        ("click {colour}", {"instruction": "click red"}, "click red"),
        ("write {}", {}, "write {}"),
    ],
)
def test_an_instruction_is_the_tasks_own_where_reset_gives_none_and_no_field_is_left(
    template: str, info: dict[str, Any], instruction: str
) -> None:
    templated = replace(task("well"), instruction=template)
    assert calls.reset(Instructed(info), templated, 0).instruction == instruction


@pytest.mark.parametrize("info", [{}, {"instruction": None}])
def test_a_reset_that_leaves_fields_of_the_instruction_open_is_refused(
    info: dict[str, Any],
) -> None:
    templated = replace(task("well"), instruction="click the {colour} button")
    with pytest.raises(EnvError, match=r"reset gave no info\['instruction'\].*fill in its fields"):
        calls.reset(Instructed(info), templated, 0)


async def test_names_that_are_no_utf_8_can_be_printed() -> None:
    class Wrong(Unruly):
        def evaluate(self) -> Verdict:
            return Verdict("fail", "no file na\udcefve.txt")

    player = threaded(Wrong)
    assert (await play(player, "well"))[2] == "no file na?ve.txt"
    await player.close()
    instruction = calls.reset(
        Instructed({"instruction": "open na\udcefve.txt"}), task("well"), 0
    ).instruction
    assert instruction == "open na?ve.txt"


async def test_a_verdict_without_a_reason_makes_its_episode_invalid() -> None:
    class Wrong(Unruly):
        def evaluate(self) -> Verdict:
            return Verdict("fail", None)  # type: ignore[arg-type]

    player = threaded(Wrong)
    outcome, stop, reason = await play(player, "well")
    assert (outcome, stop) == ("invalid", "environment")
    assert "Verdict.reason must be str, got NoneType" in reason
    await player.close()


@pytest.mark.parametrize("how", ["raise", "exit", "hang"])
async def test_an_environment_that_does_not_close_is_left_to_itself(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart_cli.env.carriers.CLOSE_DEADLINE_S", 0.3)
    player = threaded(Unruly)
    assert (await play(player, f"close-{how}"))[0] == "pass"
    await player.renew()
    assert (await play(player, "well"))[0] == "pass"
    await player.close()


async def test_environments_that_hang_are_counted_and_no_more_are_made_than_a_bound() -> None:
    player = threaded(Unruly, deadline_s=0.05)
    before = threading.active_count()
    for _ in range(MOST_HUNG):
        await play(player, "step-hang", "click(500,500)")
    assert player.hung == MOST_HUNG
    _, _, reason = await play(player, "well")
    assert f"{MOST_HUNG} of its environments hang" in reason
    assert threading.active_count() <= before + MOST_HUNG


async def test_a_task_that_is_true_at_reset_is_invalid_and_says_so() -> None:
    player = threaded(Unruly)
    outcome, stop, reason = await play(player, "true", "done()")
    assert (outcome, stop) == ("invalid", "environment")
    assert "true at reset" in reason
    await player.close()


async def test_an_evaluator_that_acts_is_not_asked_at_reset() -> None:
    class Acts(Unruly):
        evaluate_acts = True

    player = threaded(Acts)
    assert (await play(player, "true", "done()"))[0] == "pass"
    await player.close()


@pytest.mark.parametrize(
    ("texts", "outcome"),
    [(("wait()",), "fail"), (("done()",), "fail"), (("fail()",), "pass")],
)
async def test_what_cannot_be_done_is_passed_by_saying_so_and_not_by_running_out_of_steps(
    texts: tuple[str, ...], outcome: str
) -> None:
    player = threaded(Unruly)
    assert (await play(player, "infeasible", *texts))[0] == outcome
    await player.close()


async def test_the_reason_of_a_broken_oracle_is_reported() -> None:
    player = threaded(Unruly)
    await player.reset(task("solve-raise"), 0)
    with pytest.raises(EnvError, match="solve: ZeroDivisionError"):
        await player.solve()
    await player.step(Click(x=0, y=0))
    await player.step(Done())
    await player.close()
