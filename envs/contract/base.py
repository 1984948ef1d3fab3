"""The contract of an environment: gymnasium's `reset` and `step`, and a verdict with a reward.

An environment plays one task at a time in one GUI. Observations are encoded screenshots, actions are
the classes of `envs.contract.actions`. The evaluator looks at the state, never at the policy's claims.

Task          a goal with its limits
Observation   a screenshot, and the texts beside it
Verdict       pass, fail or invalid, with a reason and a reward
GuiEnv        the methods that every environment has
Solvable      the methods of an environment that has a solution; optional
task_of       the task that `reset` is asked for, by its id or as a Task
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
"""Texts beside a screenshot: the widgets that applications report, and the content of a terminal."""


@dataclass(frozen=True)
class Observation:
    """One encoded screenshot with its size in pixels, and the texts that were requested beside it."""

    screenshot: bytes
    media_type: str  # image/png, image/jpeg or image/webp
    width: int  # pixels
    height: int  # pixels
    texts: Mapping[ObservedKind, str] = field(default_factory=dict)
    """The texts that `make_env(observe=...)` requested, by kind; see envs/contract/observed_texts.py."""
    screen_key: str = ""
    """The suite's own key of this screen, e.g. an address: an explorer counts screens with one key as one
    state. Empty: the explorer compares the pictures of screens that have no tree."""


@dataclass(frozen=True)
class Task:
    """A goal and its limits. The seed that `reset` gets makes one instance of it."""

    id: str  # unique in its suite, e.g. mini/popup
    suite: str
    instruction: str  # for the policy; `reset` fills in {fields}
    max_steps: int  # steps after which an episode is cut off
    tier: int = 1  # roughly the steps of the shortest solution; 1 is easiest
    split: Split = "train"  # whether the template may be trained on
    params: Mapping[str, Any] = field(default_factory=dict)
    feasible: bool = True  # False: it cannot be done, and only the action `fail` passes
    evaluated: bool = True
    """False if the task has no evaluator: GuiEnv.evaluate returns invalid, and `[env.judge]` gives the
    verdict."""


def reward_of(outcome: Outcome, reward: float | None = None) -> float | None:
    """Return `reward`, or if that is None 1.0 for pass and 0.0 for fail.

    Return None for an invalid outcome.
    """
    if outcome == "invalid":
        return None
    if reward is None:
        return 1.0 if outcome == "pass" else 0.0
    return reward


@dataclass(frozen=True)
class Verdict:
    """The evaluator's result: pass, fail, or invalid (broken environment or evaluator).

    An evaluator that measures how much of the goal is reached gives a `reward` too, or only a reward
    (`Verdict.scored`). The reward defaults to 1.0 for pass and 0.0 for fail. An invalid verdict has no
    reward and is never trained on.
    """

    outcome: Outcome
    reason: str
    reward: float | None = None  # in [0, 1]
    judgement: Judgement | None = None  # the answer of a judge model; environments leave it out

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", reward_of(self.outcome, self.reward))

    @classmethod
    def scored(cls, reward: float, reason: str) -> Verdict:
        """Return the verdict of a reward alone: pass if it is 1 or more, else fail."""
        return cls("pass" if reward >= 1.0 else "fail", reason, reward)


@runtime_checkable
class GuiEnv(Protocol):
    """One GUI that plays one task at a time. Not thread-safe: one slot owns it.

    An environment whose evaluator changes the state (it saves a document, say) has an attribute
    `evaluate_acts` that is true while it plays such a task. It is then not evaluated right after reset,
    which otherwise checks that the task is not solved already.

    The configuration gives each call a deadline. A call that waits for something that environments share
    uses envs/contract/queueing.py: the deadline stands still meanwhile, and the wait ends once the slot has
    given up.
    """

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the task `options["task"]`, a task's id or a Task, from `seed`.

        Returns the first observation, and an info dict that holds `instruction`, the task's text with its
        fields filled in. `task_of` finds the task, and raises TaskError if the suite does not have it.
        Raises EnvError if the GUI cannot be brought up.

        The info dict may hold `app_log`, a list of texts: what the application reported meanwhile, such as
        console errors and failed requests. That of `step` may, too. They are stored with the trajectory, in
        bounded lines.

        If `options["free"]` is true, neither a step limit nor a reached goal ends the episode, so that an
        explorer may go on. An environment that cannot do that ignores the option.
        """
        ...

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform one action; returns (observation, reward, terminated, truncated, info).

        `reward` is what this step earned, any finite number; it is stored with the step. The shipped
        suites return the verdict's reward on the step that ends the episode, and 0.0 on the others. An
        action that hits nothing does no harm. Raises EnvError if the GUI broke, and ActionCausedError if
        this action broke it.
        """
        ...

    def evaluate(self) -> Verdict:
        """Return the verdict on the present state. A wrong state is a fail, never an exception.

        An invalid verdict tells what broke. May raise ActionCausedError if the policy's actions made the
        state impossible to evaluate.
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
    """Return the entry of `tasks` for `options["task"]`, a task's id or a Task.

    A `reset` begins with this call.

    `reasons` has the reason for each task that `suite` leaves out. Raises TaskError if there is no such task.
    """
    task = (options or {}).get("task")
    task_id = task.id if isinstance(task, Task) else task
    if not isinstance(task_id, str):
        got_type = "" if task_id is None else f", got {type(task_id).__name__}"
        raise TaskError(
            f"reset needs options={{'task': ...}}, the id of a task of suite {suite} or its Task{got_type}"
        )
    if reason := reasons.get(task_id):
        raise TaskError(f"suite {suite} leaves out {task_id!r}: {reason}")
    if task_id not in tasks:
        raise TaskError(f"suite {suite} has no task {task_id!r}{did_you_mean(task_id, tasks)}")
    return tasks[task_id]


@runtime_checkable
class Solvable(Protocol):
    """A GuiEnv with a solution of the task that it plays. Optional: `dart data collect` records it.

    It may also have `oracle_hint() -> str`: the next action as an instruction for one step, e.g. `click
    next`, or an empty text if there is none.
    """

    def oracle_action(self) -> Action:
        """Return the next action of a shortest solution from the present state.

        Raises NoOracleError if the task has no known solution, EnvError if no action leads to the goal from
        here.
        """
        ...
