"""One call to an environment, in its own thread or process; the answer is checked.

reset, judge_start, step, evaluate, solve, look   raise EnvError for an answer that is none
Deadlines how long each may take
reporting_wait   reports a call that is out to a WaitReporter
AsyncEnv    an environment that is called from an event loop, wherever it lives
as_regular_exception  an error as one that ends no process
log_traceback    the traceback of an environment's mistake, once for each place that raises
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Protocol, get_args

from bus.errors import EnvError, NoOracleError
from bus.heartbeat import WaitReporter
from bus.messages import Outcome
from envs.actions import Action, Answer, Done, Fail
from envs.base import GuiEnv, Observation, Solvable, Task, Verdict
from envs.elements import Element, Explorable, ScreenState
from envs.observed import KINDS, MOST_CHARS, bounded
from envs.screenshots import ScreenFormat, size_of

logger = logging.getLogger(__name__)

_ACTIONS = get_args(get_args(Action)[0])
MOST_TRACEBACK = 20_000
"""Characters of a traceback that are kept, from its end."""

_FIELD = re.compile(r"\{\w+\}")

_logged: set[tuple[str, str]] = set()
"""Places that have raised in this process, and what: their tracebacks are in its log."""

Looked = tuple[ScreenState, list[Element]]
"""Which screen is shown, and what can be done on it."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds that each kind of call may take."""

    reset_s: float
    step_s: float
    evaluate_s: float

    def of_step(self, action: Action, *, last: bool) -> float:
        """Of a step; one that ends the episode is judged before it returns (GuiEnv.step)."""
        ends = last or isinstance(action, Done | Fail | Answer)
        return self.step_s + (self.evaluate_s if ends else 0.0)


@dataclass(frozen=True)
class StepResult:
    """The observation after one action, and whether the episode is over."""

    observation: Observation
    terminated: bool
    truncated: bool
    reward: float | None = None  # of this step, finite; None where the environment gave none


def reporting_wait(
    waits: WaitReporter | None, what: str, deadline_s: float
) -> contextlib.AbstractContextManager[None]:
    """Report a pending call to `waits`, if given, while inside."""
    if waits is None:
        return contextlib.nullcontext()
    return waits.waiting(what, deadline_s, on="environment")


class AsyncEnv(Protocol):
    """An environment in a thread or process of its own; each call has a deadline.

    All its errors, and an unexpected exit, are raised as EnvError.
    """

    @property
    def hung(self) -> int:
        """Environments that overran a deadline and still run."""
        ...

    async def reset(self, task: Task, seed: int, *, free: bool = False) -> tuple[Observation, str]:
        """Start the task; returns the first observation and the instruction.

        `free`: neither a limit nor the goal ends the episode (GuiEnv.reset).
        """
        ...

    async def judge_start(self) -> Verdict | None:
        """The verdict on the state right after `reset`; None where it cannot be judged."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Perform one action."""
        ...

    async def evaluate(self) -> Verdict:
        """Judge the present state."""
        ...

    async def solve(self) -> tuple[Action, str]:
        """The environment's own next action, and its hint. Raises NoOracleError."""
        ...

    async def look(self) -> Looked | None:
        """The present screen's state and elements; None where the environment cannot tell them."""
        ...

    async def renew(self) -> None:
        """Close the environment; the next call makes a fresh one."""
        ...

    async def close(self) -> None:
        """Free everything; may be called twice."""
        ...


AS_GIVEN = ScreenFormat()


def reset(
    env: GuiEnv, task: Task, seed: int, screens: ScreenFormat = AS_GIVEN, *, free: bool = False
) -> tuple[Observation, str]:
    """Start the task; returns the first observation, encoded as `screens`, and the instruction."""
    options = {"task": task, "free": True} if free else {"task": task}
    observation, info = env.reset(seed=seed, options=options)
    told: object = info.get("instruction")
    if told is None and _FIELD.search(task.instruction):
        raise EnvError(
            f"reset gave no info['instruction'] and the instruction of {task.id} is "
            f"{task.instruction!r}; fill in its fields"
        )
    return screens.of(_checked_observation("reset", observation)), sendable(
        str(task.instruction if told is None else told)
    )


def step(env: GuiEnv, action: Action, screens: ScreenFormat = AS_GIVEN) -> StepResult:
    """Perform one action; the observation is encoded as `screens`."""
    observation, reward, terminated, truncated, _ = env.step(action)
    screen = screens.of(_checked_observation("step", observation))
    return StepResult(screen, bool(terminated), bool(truncated), _step_reward(env, reward))


def evaluate(env: GuiEnv) -> Verdict:
    """Judge the present state."""
    verdict: object = env.evaluate()
    if not isinstance(verdict, Verdict) or verdict.outcome not in get_args(Outcome):
        raise EnvError(f"evaluate gave {verdict!r}; want a Verdict of {get_args(Outcome)}")
    _check_types("evaluate", verdict, {"reason": str})
    reward: object = verdict.reward
    if reward is None:
        return verdict
    value = float(reward) if isinstance(reward, Real) else math.nan
    if not 0 <= value <= 1:  # NaN is in no range
        raise EnvError(
            f"{type(env).__name__}.evaluate gave the reward {reward!r} ({verdict.outcome}: "
            f"{verdict.reason}); want a number in [0, 1]"
        )
    return replace(verdict, reward=value)


def judge_start(env: GuiEnv) -> Verdict | None:
    """The verdict right after reset; None where it cannot be judged."""
    if getattr(env, "evaluate_acts", False):
        return None
    try:
        return evaluate(env)
    except Exception as error:  # noqa: BLE001 - an evaluator may need things that the task creates
        logger.debug("no verdict at reset: %s: %s", type(error).__name__, error)
        return None


def solve(env: GuiEnv) -> tuple[Action, str]:
    """The next action of the environment's own solution, and its hint, empty where it gives none.

    Raises NoOracleError.
    """
    if not isinstance(env, Solvable):
        raise NoOracleError("this environment has no oracle_action (envs.base.Solvable)")
    action: object = env.oracle_action()
    if not isinstance(action, _ACTIONS):
        raise EnvError(f"oracle_action gave {action!r}; want an action of envs.actions")
    hint: object = getattr(env, "oracle_hint", str)()
    if not isinstance(hint, str):
        raise EnvError(f"oracle_hint gave {hint!r}; want a text")
    return action, sendable(hint)


def look(env: GuiEnv) -> Looked | None:
    """State and elements of the present screen; None where it is not Explorable."""
    if not isinstance(env, Explorable):
        return None
    state: object = env.state()
    elements: object = env.elements()
    if not isinstance(state, ScreenState):
        raise EnvError(f"state gave {state!r}; want a ScreenState")
    if not isinstance(elements, list) or not all(isinstance(each, Element) for each in elements):
        raise EnvError(f"elements gave {str(elements)[:200]}; want a list of Element")
    state = ScreenState(state.id, sendable(state.route), sendable(state.reason))
    return state, [replace(each, name=sendable(each.name)) for each in elements]


def _step_reward(env: GuiEnv, reward: object) -> float | None:
    if reward is None:
        return None
    value = float(reward) if isinstance(reward, Real) else math.nan
    if not math.isfinite(value):
        raise EnvError(
            f"{type(env).__name__}.step gave the reward {reward!r}; want a finite number, or None"
        )
    return value


def _checked_observation(what: str, observation: object) -> Observation:
    if not isinstance(observation, Observation):
        raise EnvError(f"{what} gave {observation!r}; want an Observation")
    kinds = {"screenshot": bytes, "media_type": str, "width": int, "height": int, "screen_key": str}
    _check_types(what, observation, kinds)
    if min(observation.width, observation.height) < 1:
        size = f"{observation.width}x{observation.height}"
        raise EnvError(f"{what} gave an Observation of {size} pixels; want at least 1x1")
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
    """The observation with texts that can be sent, of a bounded length."""
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


def as_regular_exception(error: BaseException, where: str) -> Exception:
    """`error`, or an EnvError for one that a future cannot hold or that ends the process (SystemExit)."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return EnvError(f"{where}: {type(error).__name__}: {error}")


def traceback_of(error: BaseException) -> tuple[str, str]:
    """Where and what an error was raised, the same each time, and its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = "".join(traceback.format_exception(error))
    return f"{type(error).__name__} at {where}", text[-MOST_TRACEBACK:]


def log_traceback(what: str, raised_at: str, text: str) -> None:
    """Log the traceback of an environment's mistake. One of the same place is not logged again.

    Each episode's reason says the error; an environment that always raises would bury the log.
    """
    place = what.rpartition(": ")[2], raised_at
    if place not in _logged:
        _logged.add(place)
        logger.error("%s; further ones at this place are not logged\n%s", what, text.rstrip())


def has_logged_tracebacks() -> bool:
    """Whether a traceback is in this process's log."""
    return bool(_logged)
