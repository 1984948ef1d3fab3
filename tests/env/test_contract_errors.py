"""A mistake of contract in an environment is told by what the contract is, in `dart env check` and in a run alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bus.errors import EnvError
from dart_cli.env import calls
from envs.contract.actions import Click
from envs.contract.base import Task, Verdict
from envs.contract.elements import ScreenState
from tests.env.parts import threaded
from tests.env.unruly_suite import SCREEN, Unruly, UnrulySuite

WELL = UnrulySuite.tasks["unruly/well"]
STEPPED = "step must return (observation, reward, terminated, truncated, info)"
PIXELS = np.zeros((600, 800, 3), np.uint8)


class Odd(Unruly):
    """Whatever it is made with takes the place of a method."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        super().__init__()
        for name, method in methods.items():
            setattr(self, name, method)


def begin(**methods: Callable[..., Any]) -> object:
    return calls.reset(Odd(**methods), WELL, 0)


def step(**methods: Callable[..., Any]) -> object:
    return calls.step(Odd(**methods), Click(x=0, y=0))


def stepping(*values: Any) -> dict[str, Callable[..., Any]]:
    return {"step": lambda _: values}


RETURNS = [
    (begin, {"reset": lambda **_: None}, "reset must return (observation, info), got None"),
    (begin, {"reset": lambda **_: SCREEN}, "reset must return (observation, info), got Observation("),
    (begin, {"reset": lambda **_: (SCREEN,)}, "reset must return (observation, info), got 1 value"),
    (begin, {"reset": lambda **_: (SCREEN, None)}, "with a mapping as info, got None"),
    (begin, {"reset": lambda **_: (SCREEN, {"instruction": b"go"})}, "['instruction'], got bytes b'go'"),
    (step, stepping(SCREEN, 0.0, False, {}), f"{STEPPED}, got 4 values; terminated and truncated are"),
    (step, stepping(SCREEN, 0.0, False), f"{STEPPED}, got 3 values"),
    (step, {"step": lambda _: SCREEN}, f"{STEPPED}, got Observation("),
    (step, stepping(SCREEN, 0.0, False, {}, False), "step must return a bool as truncated, got dict {}"),
    (step, stepping(SCREEN, 0.0, "no", False, {}), "step must return a bool as terminated, got str 'no'"),
    (step, stepping(SCREEN, 0.0, PIXELS, False, {}), "a bool as terminated, got ndarray array("),
    (step, stepping(SCREEN, "1", False, False, {}), "None as its reward, got str '1'"),
    (calls.evaluate, {"evaluate": lambda: True}, "evaluate must return a Verdict (envs.contract.base), got bool True"),
    (
        calls.evaluate,
        {"evaluate": lambda: Verdict("success", "")},  # type: ignore[arg-type]
        "evaluate must return a Verdict of pass, fail or invalid, got str 'success'",
    ),
    (calls.evaluate, {"evaluate": lambda: Verdict("pass", "", 3.0)}, "in [0, 1], got float 3.0 (pass: )"),
    (calls.solve, {"oracle_action": lambda: "click"}, "an action of envs.contract.actions, got str 'click'"),
    (calls.solve, {"oracle_hint": lambda: 3}, "oracle_hint must return a text, got int 3"),
    (calls.look, {"state": lambda: "home", "elements": list}, "state must return a ScreenState (envs.contract.elements), got"),
    (
        calls.look,
        {"state": lambda: ScreenState("", "", ""), "elements": lambda: ["button"]},
        "elements must return a list of Element (envs.contract.elements), got list ['button']",
    ),
]  # fmt: skip
"""(what is asked, the method in place of a sound one, what is said)."""


@pytest.mark.parametrize(("ask", "methods", "message"), RETURNS, ids=[each[2] for each in RETURNS])
def test_what_a_method_must_return_is_told_with_what_it_returned(
    ask: Callable[..., object], methods: dict[str, Callable[..., Any]], message: str
) -> None:
    is_env = ask in (calls.evaluate, calls.solve, calls.look)
    with pytest.raises(EnvError) as error:
        _ = ask(Odd(**methods)) if is_env else ask(**methods)
    assert message in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("ask", "methods", "message"),
    [
        (begin, {"reset": lambda *, seed=None: (SCREEN, {})}, "Odd has reset(*, seed=None)"),
        (begin, {"reset": lambda options: (SCREEN, {})}, "Odd has reset(options)"),
        (step, {"step": lambda: None}, "step must take what step(action) takes, Odd has step()"),
    ],
)
def test_a_method_that_takes_other_arguments_is_told_with_those_that_it_gets(
    ask: Callable[..., object], methods: dict[str, Callable[..., Any]], message: str
) -> None:
    with pytest.raises(EnvError) as error:
        ask(**methods)
    assert message in str(error.value)


def test_a_type_error_of_the_environments_own_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        begin(reset=lambda **_: 1 + None)  # type: ignore[operator]


@pytest.mark.parametrize("pixels", [PIXELS, PIXELS.tolist()], ids=["array", "lists"])
def test_pixels_in_place_of_an_observation_are_named_by_type_and_cut_short(pixels: Any) -> None:
    with pytest.raises(EnvError) as error:
        begin(reset=lambda **_: (pixels, {}))
    message = str(error.value)
    assert message.startswith(
        "reset must return an Observation(screenshot, media_type, width, height)"
    )
    assert f"first, got {type(pixels).__name__}" in message
    assert len(message) < 200


@pytest.mark.parametrize("flag", [True, np.True_, 1, np.int64(1)])
def test_flags_of_numpy_and_numbers_are_flags(flag: Any) -> None:
    stepped = calls.step(Odd(**stepping(SCREEN, 0.0, flag, flag, {})), Click(x=0, y=0))
    assert stepped.terminated is stepped.truncated is True


async def test_a_run_says_the_same_with_the_slot_before_it() -> None:
    player = threaded(lambda: Odd(**stepping(SCREEN, 0.0, False, {})))
    await player.reset(Task("x", "unruly", "click", 3), 0)
    with pytest.raises(EnvError, match=r"^env-0/0: step must return \(observation, reward, ter"):
        await player.step(Click(x=0, y=0))
    await player.close()
