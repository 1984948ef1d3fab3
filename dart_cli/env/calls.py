"""One call to an environment, in its own thread or process; the answer is checked.

perform     one call by name: reset, step, evaluate, solve, look; raises EnvError for an answer that is none
ANSWERS     the type of each call's answer
Failure     what a call raised, in plain values
sendable    a text that messages can hold
"""

from __future__ import annotations

import logging
import math
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, get_args

from bus.errors import ActionCausedError, DartError, EnvError, NoOracleError
from bus.messages import Outcome
from envs.contract.actions import Action
from envs.contract.base import GuiEnv, Observation, Solvable, Task, Verdict
from envs.contract.elements import Element, Explorable, ScreenState
from envs.contract.methods import call_method, describe, unpack, wrong_return
from envs.contract.observed_texts import KINDS, MOST_CHARS, bounded
from envs.contract.screenshots import StoredEncoding, size_of, stored_as

logger = logging.getLogger(__name__)

_ACTIONS = get_args(get_args(Action)[0])
MOST_TRACEBACK = 20_000
"""Characters of a traceback that are kept, from its end."""

_FIELD = re.compile(r"\{\w+\}")

_STEPPED = ("observation", "reward", "terminated", "truncated", "info")
"""What a step returns."""

_logged: set[tuple[str, str]] = set()
"""Places that have raised in this process, and what: their tracebacks are in its log."""

_KINDS: Mapping[str, type[EnvError]] = {
    each.__name__: each for each in (NoOracleError, ActionCausedError, EnvError)
}
"""Errors that keep their class on the way to the slot."""

Looked = tuple[ScreenState, list[Element]]
"""Which screen is shown, and what can be done on it."""


@dataclass(frozen=True)
class StepResult:
    """The observation after one action, and whether the episode is over."""

    observation: Observation
    terminated: bool
    truncated: bool
    reward: float | None = None  # of this step, finite; None where the environment gave none


@dataclass(frozen=True)
class Began:
    """The first observation of an episode, and its instruction."""

    observation: Observation
    instruction: str


def perform(
    env: GuiEnv, call: str, payload: Mapping[str, Any], screens: StoredEncoding = "png"
) -> Any:
    """Return the answer to a call, of the type that ANSWERS has for it. Raises what the environment raises."""
    match call:
        case "reset":
            return reset(env, screens=screens, **payload)
        case "step":
            return step(env, payload["action"], screens)
        case "evaluate":
            return judge_start(env) if payload["at_start"] else evaluate(env)
        case "solve":
            return solve(env)
        case _:
            return look(env)


def reset(
    env: GuiEnv, task: Task, seed: int, screens: StoredEncoding = "png", *, free: bool = False
) -> Began:
    """Start the task; the observation is encoded as `screens`."""
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
    return Began(screen, sendable(task.instruction if instruction is None else instruction))


def step(env: GuiEnv, action: Action, screens: StoredEncoding = "png") -> StepResult:
    """Perform one action; the observation is encoded as `screens`."""
    returned = call_method(env, "step", action)
    observation, reward, terminated, truncated, _ = unpack("step", returned, _STEPPED)
    screen = stored_as(_checked_observation("step", observation), screens)
    earned = _finite(reward)
    if earned is not None and math.isnan(earned):
        raise wrong_return("step", "a finite number or None as its reward", reward)
    return StepResult(
        screen, _flag("terminated", terminated), _flag("truncated", truncated), earned
    )


def evaluate(env: GuiEnv) -> Verdict:
    """Judge the present state."""
    verdict = call_method(env, "evaluate")
    if not isinstance(verdict, Verdict):
        raise wrong_return("evaluate", "a Verdict (envs.contract.base)", verdict)
    if verdict.outcome not in get_args(Outcome):
        raise wrong_return("evaluate", "a Verdict of pass, fail or invalid", verdict.outcome)
    _check_types("evaluate", verdict, {"reason": str})
    verdict = replace(verdict, reason=sendable(verdict.reason))
    reward = _finite(verdict.reward)
    if reward is not None and not 0 <= reward <= 1:  # NaN is in no range
        said = f"{describe(verdict.reward)} ({verdict.outcome}: {verdict.reason})"
        raise EnvError(f"evaluate must return a reward in [0, 1], got {said}")
    return replace(verdict, reward=reward)


def judge_start(env: GuiEnv) -> Verdict | None:
    """Return the verdict right after reset; None where it cannot be judged."""
    if getattr(env, "evaluate_acts", False):
        return None
    try:
        return evaluate(env)
    except Exception as error:  # noqa: BLE001 - an evaluator may need things that the task creates
        logger.debug("no verdict at reset: %s: %s", type(error).__name__, error)
        return None


def solve(env: GuiEnv) -> tuple[Action, str]:
    """Return the next action of the environment's own solution, and its hint, empty where it gives none.

    Raises NoOracleError.
    """
    if not isinstance(env, Solvable):
        raise NoOracleError("this environment has no oracle_action (envs.contract.base.Solvable)")
    action = call_method(env, "oracle_action")
    if not isinstance(action, _ACTIONS):
        raise wrong_return("oracle_action", "an action of envs.contract.actions", action)
    hint = call_method(env, "oracle_hint") if hasattr(env, "oracle_hint") else ""
    if not isinstance(hint, str):
        raise wrong_return("oracle_hint", "a text", hint)
    return action, sendable(hint)


def look(env: GuiEnv) -> Looked | None:
    """State and elements of the present screen; None where it is not Explorable."""
    if not isinstance(env, Explorable):
        return None
    state, elements = call_method(env, "state"), call_method(env, "elements")
    if not isinstance(state, ScreenState):
        raise wrong_return("state", "a ScreenState (envs.contract.elements)", state)
    if not isinstance(elements, list) or not all(isinstance(each, Element) for each in elements):
        raise wrong_return("elements", "a list of Element (envs.contract.elements)", elements)
    state = ScreenState(state.id, sendable(state.route), sendable(state.reason))
    return state, [replace(each, name=sendable(each.name)) for each in elements]


def _finite(reward: object) -> float | None:
    """Return a reward as a number, NaN for what is no finite one; None where none was given."""
    value = float(reward) if isinstance(reward, Real) else math.nan
    return None if reward is None else value if math.isfinite(value) else math.nan


def _flag(name: str, value: object) -> bool:
    """Return a flag that `step` returned, as a bool or as a number. Raises EnvError."""
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    if isinstance(value, Real) or is_numpy:
        return bool(value)
    raise wrong_return("step", f"a bool as {name}", value)


def _checked_observation(what: str, observation: object) -> Observation:
    if not isinstance(observation, Observation):
        wanted = "Observation(screenshot, media_type, width, height) of envs.contract.base"
        raise wrong_return(what, f"an {wanted} first", observation)
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
    """Return the observation with texts that can be sent, of a bounded length."""
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
    """Raise EnvError for a field not of exactly its type, since it is sent and stored."""
    for name, kind in kinds.items():
        given = type(getattr(answer, name))
        if given is not kind:
            raise EnvError(
                f"{what}: {type(answer).__name__}.{name} must be {kind.__name__}, got {given.__name__}"
            )


def sendable(text: str) -> str:
    """`text` without lone surrogates (from a file name that is not UTF-8): messages cannot hold them."""
    return text.encode(errors="replace").decode()


@dataclass(frozen=True)
class Failure:
    """What a call raised, in plain values."""

    kind: str  # of _KINDS
    text: str
    raised_at: str = ""  # of an environment's mistake: what was raised where, the same each time
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, call: str) -> Failure:
        """Errors of ours say their own text; all others are mistakes of the environment."""
        if isinstance(error, EnvError):
            kinds = (kind for kind, each in _KINDS.items() if isinstance(error, each))
            return cls(next(kinds), str(error))
        text = f"{call}: {type(error).__name__}: {error}"
        if isinstance(error, DartError):
            return cls(EnvError.__name__, text)
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        whole = "".join(traceback.format_exception(error))[-MOST_TRACEBACK:]
        return cls(EnvError.__name__, text, f"{type(error).__name__} at {where}", whole)

    def error(self, name: str, call: str) -> EnvError:
        """As the error of the environment `name`; the traceback is logged.

        One of the same place is not logged again: each episode's reason says the error, and an environment
        that always raises would bury the log.
        """
        place = call, self.raised_at
        if self.traceback and place not in _logged:
            _logged.add(place)
            logger.error(
                "%s: %s failed; further ones at this place are not logged\n%s",
                *(name, call, self.traceback.rstrip()),
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
    """Whether a traceback is in this process's log."""
    return bool(_logged)
