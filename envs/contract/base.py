"""The contract every environment keeps: gymnasium's `reset` and `step`, and a verdict with a reward.

An environment plays one task at a time in one GUI. Observations are encoded screenshots; actions
are `envs.contract.actions`; the evaluator looks at the state, never at the policy's claims.

GuiEnv     what every environment has
task_of    the task that `reset` is asked for, by its id or as a Task
Solvable   an environment that knows a solution
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from bus.error_texts import did_you_mean
from bus.errors import TaskError
from envs.contract.actions import Action

if TYPE_CHECKING:
    from bus.messages import Judgement, Outcome  # types alone: the messages take long to load

_T = TypeVar("_T")

Split = Literal["train", "heldout"]
ObservedKind = Literal["accessibility", "terminal"]
"""Texts beside a screenshot: what applications report of their widgets; what a terminal shows."""


@dataclass(frozen=True)
class Observation:
    """One screenshot, encoded, with its size in pixels, and the texts that were asked for beside it."""

    screenshot: bytes
    media_type: str  # image/png, image/jpeg or image/webp
    width: int  # pixels
    height: int  # pixels
    texts: Mapping[ObservedKind, str] = field(default_factory=dict)
    """Of the kinds that `make_env(observe=...)` asked for; see envs/contract/screenshots.py."""
    screen_key: str = ""
    """The same for screens that an explorer counts as one state, where a suite tells them by more than its
    tree, e.g. by an address; empty: by their picture."""


@dataclass(frozen=True)
class Task:
    """A goal and its evaluator, by name; the seed given to `reset` makes one instance of it."""

    id: str  # unique in its suite, e.g. mini/popup
    suite: str
    instruction: str  # the text given to the policy; may hold {fields} that reset fills in
    max_steps: int  # steps after which an episode is cut off
    tier: int = 1  # shortest solution in steps, roughly; 1 is easiest
    split: Split = "train"  # whether the template may be trained on
    params: Mapping[str, Any] = field(default_factory=dict)
    feasible: bool = True  # False: it cannot be done, and only the action `fail` passes
    evaluated: bool = True
    """False: it has no evaluator, and GuiEnv.evaluate says invalid; `[env.judge]` gives the verdict."""


def reward_of(outcome: Outcome, reward: float | None = None) -> float | None:
    """Return the reward given with an outcome; without one 1.0 for pass and 0.0 for fail. None for invalid."""
    if outcome == "invalid":
        return None
    if reward is None:
        return 1.0 if outcome == "pass" else 0.0
    return reward


@dataclass(frozen=True)
class Verdict:
    """The evaluator's result: pass, fail, or invalid (broken environment or evaluator).

    An evaluator that measures how much is done gives a `reward` as well, or a reward alone
    (`Verdict.scored`). A reward that is left out is 1.0 for pass and 0.0 for fail. An invalid
    verdict, which is never trained on, has none.
    """

    outcome: Outcome
    reason: str
    reward: float | None = None  # in [0, 1]
    judgement: Judgement | None = None  # what a judge model said; environments leave it out

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", reward_of(self.outcome, self.reward))

    @classmethod
    def scored(cls, reward: float, reason: str) -> Verdict:
        """By the reward alone: a pass where it is 1."""
        return cls("pass" if reward >= 1.0 else "fail", reason, reward)


@runtime_checkable
class GuiEnv(Protocol):
    """One GUI that plays one task at a time. Not thread-safe: one slot owns it.

    An environment whose evaluator changes the state (it saves a document, say) has an attribute
    `evaluate_acts` that is true while it plays such a task. It is then not evaluated at reset, which
    would find out whether the task is solved already.

    Each call has a deadline of the configuration. A call that waits for what environments share does so by
    envs/contract/queueing.py: the deadline stands still meanwhile, and a slot that has left is told.
    """

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the task `options["task"]`, a task's id or a Task, from `seed`.

        `task_of` finds it, and raises TaskError for one that the suite does not have. Returns the first observation and an info dict that holds `instruction`, the task's text
        with its fields filled in. Raises EnvError if the GUI cannot be brought up.

        `options["free"]`, if true, asks for an episode that neither a step limit nor a reached goal
        ends, so that an explorer may go on; an environment that cannot do that ignores it.
        """
        ...

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform one action; returns (observation, reward, terminated, truncated, info).

        `reward` is what this step earned, any finite number: it is kept with the step. The shipped
        suites give the verdict's reward on the step that ends the episode, and 0.0 on the others. An
        action that hits nothing is harmless. Raises EnvError if the GUI broke, ActionCausedError if
        this action broke it.
        """
        ...

    def evaluate(self) -> Verdict:
        """Judge the present state. Never raises for a wrong state; an invalid verdict says what broke.

        May raise ActionCausedError where the policy's actions made the state impossible to judge.
        """
        ...

    def close(self) -> None:
        """Free everything; may be called twice."""
        ...


def task_of(
    options: Mapping[str, Any] | None,
    tasks: Mapping[str, _T],
    suite: str,
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> _T:
    """Return what `tasks` holds for `options["task"]`, a task's id or a Task: the first thing that a `reset` does.

    `reasons` says of tasks that `suite` leaves out why. Raises TaskError, the same in every suite.
    """
    wanted = (options or {}).get("task")
    task_id = wanted.id if isinstance(wanted, Task) else wanted
    if not isinstance(task_id, str):
        given = "" if task_id is None else f", got {type(task_id).__name__}"
        raise TaskError(
            f"reset needs options={{'task': ...}}, the id of a task of suite {suite} or its Task{given}"
        )
    if reason := reasons.get(task_id):
        raise TaskError(f"suite {suite} leaves out {task_id!r}: {reason}")
    if task_id not in tasks:
        raise TaskError(f"suite {suite} has no task {task_id!r}{did_you_mean(task_id, tasks)}")
    return tasks[task_id]


@runtime_checkable
class Solvable(Protocol):
    """A GuiEnv that knows a solution of the task it plays. Optional: it fills the experience pool.

    It may also have `oracle_hint() -> str`: the next action as an instruction of one step, e.g.
    `click next`; empty where there is no such text. Without it no hint is known.
    """

    def oracle_action(self) -> Action:
        """Return the next action of a shortest solution from the present state.

        Raises NoOracleError for a task without a known solution, EnvError where it finds none.
        """
        ...
