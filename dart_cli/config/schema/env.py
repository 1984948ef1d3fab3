"""The environments and the tasks: sections [env] and [env.judge]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from dart_cli.config.schema.base import (
    MOST_SLOTS,
    TRAIN_SEEDS,
    PositiveSeconds,
    Section,
)


class JudgeConfig(Section):
    """A second model that judges episodes: docs/eval.md."""

    use: Literal["missing", "check"] = "missing"
    """`missing`: it gives the verdict of tasks that have no evaluator, and of no others. `check`: of these
    too, and its opinion of all others is kept beside the evaluator's verdict, which stands."""

    url: str = ""
    """A model behind the OpenAI chat API, with images: the base URL up to the version, e.g.
    `http://localhost:8000/v1`. Empty: `model` is a folder."""

    model: str = ""
    """What the server calls the model; without `url` a model folder, which each `dart env` process loads."""

    key_env: str = ""
    """`url`: environment variable with the key, which is kept nowhere; empty for OPENAI_API_KEY, if it is set."""

    answer: Literal["verdict", "score"] = "verdict"
    """What it is asked for: pass or fail; or the part of the task that is done, a reward in [0, 1], of
    which a pass needs 1."""

    images: int = Field(default=5, ge=2, le=64)
    """Most screenshots that it is shown: the first, the last, and others evenly between them."""


class EnvConfig(Section):
    """The environments of one `dart env` process."""

    suite: str = "mini"
    """Name of a task suite, or `package.module:Suite` / `file.py:Suite` of your own."""

    tasks: list[str] = []
    """Tasks to train on: ids, patterns such as `miniwob/click-*`, and `!pattern` for those left
    out; empty for all of the suite's training split."""

    heldout: list[str] = []
    """Tasks (ids, patterns) kept out of training, in addition to those that the suite holds out;
    they are evaluated as compositions."""

    seeds: Annotated[tuple[int, int], Strict(False)] = (0, TRAIN_SEEDS)
    """Seeds of training instances: from the first number up to, but not including, the second."""

    slots: int = Field(default=16, ge=1, le=MOST_SLOTS)
    """Environments that one process plays at once."""

    options: dict[str, Any] = {}
    """Passed to the environment, e.g. its resolution."""

    observe: list[Literal["screenshot", "accessibility", "terminal"]] = ["screenshot"]
    """What the policy is given of a screen: always the screenshot; as text beside it the accessibility
    tree, or what a terminal shows, where the suite has them (docs/environments)."""

    screenshots: Literal["png", "webp", "jpeg"] = "png"
    """How screenshots are encoded, once, before the policy sees them: `png` leaves them as the suite
    gives them; `webp`, without loss, takes a third of that, and `jpeg`, of quality 90, still less of
    photographs. Policy, store and trainer decode the same bytes (docs/environments)."""

    reset_deadline_s: PositiveSeconds = 60.0
    """Seconds a reset may take before the episode is invalid and the slot starts afresh; waits for what
    environments share, such as a turn to boot, do not count."""

    step_deadline_s: PositiveSeconds = 30.0
    """Seconds an action may take, likewise; an action that ends its episode is judged at once, and
    may take `evaluate_deadline_s` more."""

    evaluate_deadline_s: PositiveSeconds = 60.0
    """Seconds an evaluator may take, likewise."""

    isolation: Literal["thread", "process"] = "thread"
    """Where each environment runs: in a thread, which is cheap; or in a process, which can be killed
    when it hangs, and which costs its slot alone when it crashes."""

    judge: JudgeConfig | None = None
    """A second model that judges the episodes of tasks without an evaluator, or checks one."""


def observed_kinds(env: EnvConfig) -> tuple[str, ...]:
    """Return the texts of `env.observe`, without the screenshot."""
    return tuple(kind for kind in env.observe if kind != "screenshot")
