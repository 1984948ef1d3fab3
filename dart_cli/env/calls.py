"""Performs one call to an environment, in the environment's thread or process, and checks the answer.

perform     performs a call by name: reset, step, evaluate, solve, look; raises EnvError for a wrong answer
ANSWERS     the type of each call's answer
Failure     the error that a call raised, in plain values
sendable    returns a text that messages can hold
"""

from __future__ import annotations

import logging
import math
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, get_args

from bus.errors import ActionCausedError, DartError, EnvError, NoOracleError, NotSolvableError
from bus.messages import Outcome
from dart_cli.env.app_log import reported_lines
from envs.contract.actions import Action
from envs.contract.base import GuiEnv, Observation, Solvable, Task, Verdict
from envs.contract.elements import Element, Explorable, ScreenState
from envs.contract.methods import call_method, describe, unpack, wrong_return
from envs.contract.observed_texts import KINDS, MOST_CHARS, bounded
from envs.contract.screenshots import StoredEncoding, size_of, stored_as

logger = logging.getLogger(__name__)

_ACTIONS = get_args(get_args(Action)[0])
MOST_TRACEBACK = 20_000
"""Most characters of a traceback that are kept, counted from its end."""

_FIELD = re.compile(r"\{\w+\}")

_STEP_FIELDS = ("observation", "reward", "terminated", "truncated", "info")
"""Names of the values that `GuiEnv.step` returns."""

_logged: set[tuple[str, str]] = set()
"""The (call, place) of each error whose traceback this process has logged."""

_KINDS: Mapping[str, type[EnvError]] = {
    kind.__name__: kind for kind in (NotSolvableError, NoOracleError, ActionCausedError, EnvError)
}
"""Errors that keep their class on the way to the slot."""

Looked = tuple[ScreenState, list[Element]]
"""The state of the present screen, and the elements that can be used on it."""


@dataclass(frozen=True)
class StepResult:
    """The result of one action: the observation after it, and whether the episode is over."""

    observation: Observation
    terminated: bool
    truncated: bool
    reward: float | None = None  # of this step, finite; None if the environment gave none
    app_log: list[str] = field(default_factory=list)  # what the application reported meanwhile


@dataclass(frozen=True)
class Began:
    """The beginning of an episode: its first observation and its instruction."""

    observation: Observation
    instruction: str
    app_log: list[str] = field(default_factory=list)  # what the application reported meanwhile


def perform(
    env: GuiEnv, call: str, payload: Mapping[str, Any], screens: StoredEncoding = "png"
) -> Any:
    """Return the answer to a call; ANSWERS has its type.

    Raises what the environment raises, and EnvError for a wrong answer. `screens` is the encoding of
    screenshots in the answer.
    """
    match call:
        case "reset":
            return reset(env, screens=screens, **payload)
        case "step":
            return step(env, payload["action"], screens)
        case "evaluate":
            return evaluate_start(env) if payload["at_start"] else evaluate(env)
        case "solve":
            return solve(env)
        case _:
            return look(env)


def reset(
    env: GuiEnv, task: Task, seed: int, screens: StoredEncoding = "png", *, free: bool = False
) -> Began:
    """Start the task and return the first observation, encoded as `screens`, with the instruction.

    Raises EnvError for a wrong answer of the environment.
    """
    options = {"task": task, "free": True} if free else {"task": task}
    returned = call_method(env, "reset", seed=seed, options=options)
    observation, info = unpack("reset", returned, ("observation", "info"))
    if not isinstance(info, Mapping):
        raise wrong_return("reset", "(observation, info) with a mapping as info", info)
    instruction: object = info.get("instruction")
    if not isinstance(instruction, str | None):
        raise wrong_return("reset", "a text as info['instruction']", instruction)
    if instruction is None and _FIELD.search(task.instruction):
        raise EnvError(
            f"reset gave no info['instruction'] and the instruction of {task.id} is "
            f"{task.instruction!r}; fill in its fields"
        )
    screen = stored_as(_checked_observation("reset", observation), screens)
    text = sendable(task.instruction if instruction is None else instruction)
    return Began(screen, text, reported_lines("reset", info))


def step(env: GuiEnv, action: Action, screens: StoredEncoding = "png") -> StepResult:
    """Perform one action and return its result, whose observation is encoded as `screens`.

    Raises EnvError for a wrong answer of the environment.
    """
    returned = call_method(env, "step", action)
    observation, reward, terminated, truncated, info = unpack("step", returned, _STEP_FIELDS)
    screen = stored_as(_checked_observation("step", observation), screens)
    step_reward = _finite(reward)
    if step_reward is not None and math.isnan(step_reward):
        raise wrong_return("step", "a finite number or None as its reward", reward)
    return StepResult(
        screen,
        _flag("terminated", terminated),
        _flag("truncated", truncated),
        step_reward,
        reported_lines("step", info),
    )


def evaluate(env: GuiEnv) -> Verdict:
    """Return the environment's verdict on the present state. Raises EnvError if it is no valid Verdict."""
    verdict = call_method(env, "evaluate")
    if not isinstance(verdict, Verdict):
        raise wrong_return("evaluate", "a Verdict (envs.contract.base)", verdict)
    if verdict.outcome not in get_args(Outcome):
        raise wrong_return("evaluate", "a Verdict of pass, fail or invalid", verdict.outcome)
    _check_types("evaluate", verdict, {"reason": str})
    verdict = replace(verdict, reason=sendable(verdict.reason))
    reward = _finite(verdict.reward)
    if reward is not None and not 0 <= reward <= 1:  # NaN is in no range
        answer = f"{describe(verdict.reward)} ({verdict.outcome}: {verdict.reason})"
        raise EnvError(f"evaluate must return a reward in [0, 1], got {answer}")
    return replace(verdict, reward=reward)


def evaluate_start(env: GuiEnv) -> Verdict | None:
    """Return the verdict on the state right after reset; None if that state cannot be evaluated."""
    if getattr(env, "evaluate_acts", False):
        return None
    try:
        return evaluate(env)
    except Exception as error:  # noqa: BLE001 - an evaluator may need things that the task creates
        logger.debug("no verdict at reset: %s: %s", type(error).__name__, error)
        return None


def solve(env: GuiEnv) -> tuple[Action, str]:
    """Return (action, hint): the next action of the environment's own solution, and its hint or "".

    Raises NotSolvableError if the environment has no oracle, NoOracleError if it has no solution of the task.
    """
    if not isinstance(env, Solvable):
        raise NotSolvableError(
            "this environment has no oracle_action (envs.contract.base.Solvable)"
        )
    action = call_method(env, "oracle_action")
    if not isinstance(action, _ACTIONS):
        raise wrong_return("oracle_action", "an action of envs.contract.actions", action)
    hint = call_method(env, "oracle_hint") if hasattr(env, "oracle_hint") else ""
    if not isinstance(hint, str):
        raise wrong_return("oracle_hint", "a text", hint)
    return action, sendable(hint)


def look(env: GuiEnv) -> Looked | None:
    """Return the state and the elements of the present screen; None if the environment is not Explorable."""
    if not isinstance(env, Explorable):
        return None
    state, elements = call_method(env, "state"), call_method(env, "elements")
    if not isinstance(state, ScreenState):
        raise wrong_return("state", "a ScreenState (envs.contract.elements)", state)
    if not isinstance(elements, list) or not all(isinstance(item, Element) for item in elements):
        raise wrong_return("elements", "a list of Element (envs.contract.elements)", elements)
    state = ScreenState(state.id, sendable(state.route), sendable(state.reason))
    return state, [replace(element, name=sendable(element.name)) for element in elements]


def _finite(reward: object) -> float | None:
    """Return the reward as a float, NaN if it is not a finite number; None for None."""
    value = float(reward) if isinstance(reward, Real) else math.nan
    return None if reward is None else value if math.isfinite(value) else math.nan


def _flag(name: str, value: object) -> bool:
    """Return a flag of `step` as a bool. Raises EnvError if it is neither a bool nor a number."""
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    if isinstance(value, Real) or is_numpy:
        return bool(value)
    raise wrong_return("step", f"a bool as {name}", value)


def _checked_observation(what: str, observation: object) -> Observation:
    if not isinstance(observation, Observation):
        signature = "Observation(screenshot, media_type, width, height) of envs.contract.base"
        raise wrong_return(what, f"an {signature} first", observation)
    kinds = {"screenshot": bytes, "media_type": str, "width": int, "height": int, "screen_key": str}
    _check_types(what, observation, kinds)
    try:
        width, height = size_of(observation.screenshot)
    except EnvError as error:
        raise EnvError(f"{what}: {error}") from None
    if (width, height) != (observation.width, observation.height):
        raise EnvError(
            f"{what} gave an Observation of {observation.width}x{observation.height} pixels, "
            f"its screenshot has {width}x{height}"
        )
    return _with_sendable_texts(what, observation)


def _with_sendable_texts(what: str, observation: Observation) -> Observation:
    """Return the observation with texts that messages can hold, each of a bounded length."""
    texts: object = observation.texts
    if not isinstance(texts, Mapping):
        raise EnvError(f"{what}: Observation.texts must be a mapping, got {type(texts).__name__}")
    for kind, text in texts.items():
        if kind not in KINDS or type(text) is not str:
            raise EnvError(
                f"{what}: Observation.texts must have str by {' or '.join(KINDS)}, got {kind!r}: "
                f"{type(text).__name__}"
            )
    sent = {kind: sendable(bounded(kind, text, MOST_CHARS)) for kind, text in texts.items()}
    return replace(observation, texts=sent) if sent else observation


def _check_types(what: str, answer: object, kinds: Mapping[str, type]) -> None:
    """Raise EnvError for a field that is not exactly of its type, since the fields are sent and stored."""
    for name, kind in kinds.items():
        actual = type(getattr(answer, name))
        if actual is not kind:
            raise EnvError(
                f"{what}: {type(answer).__name__}.{name} must be {kind.__name__}, got {actual.__name__}"
            )


def sendable(text: str) -> str:
    """Return the text without lone surrogates, which no message can hold (file names may have them)."""
    return text.encode(errors="replace").decode()


@dataclass(frozen=True)
class Failure:
    """The error that a call raised, in plain values."""

    kind: str  # a key of _KINDS
    text: str
    raised_at: str = ""  # for a mistake of the environment: "CLASS at FILE:LINE", else empty
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, call: str) -> Failure:
        """Return the failure for an error.

        An error that is not a DartError is a mistake of the environment.
        """
        if isinstance(error, EnvError):
            kinds = (name for name, kind in _KINDS.items() if isinstance(error, kind))
            return cls(next(kinds), str(error))
        text = f"{call}: {type(error).__name__}: {error}"
        if isinstance(error, DartError):
            return cls(EnvError.__name__, text)
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        whole = "".join(traceback.format_exception(error))[-MOST_TRACEBACK:]
        return cls(EnvError.__name__, text, f"{type(error).__name__} at {where}", whole)

    def error(self, name: str, call: str) -> EnvError:
        """Return the failure as an error of the environment `name`, and log its traceback.

        A traceback of the same place is not logged again: the reason of each episode holds the error, and an
        environment that always raises would fill the log.
        """
        place = call, self.raised_at
        if self.traceback and place not in _logged:
            _logged.add(place)
            trace = self.traceback.rstrip()
            logger.error(
                "%s: %s failed; further errors at this place are not logged\n%s", name, call, trace
            )
        return _KINDS[self.kind](f"{name}: {self.text}")


ANSWERS: Mapping[str, Any] = {
    "reset": Began,
    "step": StepResult,
    "evaluate": Verdict | None,
    "solve": tuple[Action, str],
    "look": Looked | None,
}
"""Call -> the type of its answer."""


def has_logged_tracebacks() -> bool:
    """Return True if this process has logged a traceback of an environment."""
    return bool(_logged)
