"""The environments and the tasks: sections [env] and [env.judge]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from dart_cli.config.schema.base import MOST_SLOTS, TRAIN_SEEDS, PositiveSeconds, Section


class JudgeConfig(Section):
    """A second model that judges episodes (docs/eval.md)."""

    use: Literal["missing", "check"] = "missing"
    """Which episodes are judged. `missing`: only those of tasks that have no evaluator; the judge then gives
    the verdict. `check`: all others as well; there the evaluator's verdict stands, and the judge's opinion is
    stored beside it."""

    url: str = ""
    """Base URL, up to the version, of an OpenAI-compatible chat API that takes images, e.g.
    `http://localhost:8000/v1`. If empty, `model` is a folder."""

    model: str = ""
    """The model's name at the server. Without `url`, a model folder, which each `dart env` process loads."""

    key_env: str = ""
    """With `url`: name of the environment variable that has the API key, which is stored nowhere. If empty,
    OPENAI_API_KEY is used where it is set."""

    answer: Literal["verdict", "score"] = "verdict"
    """What the judge is asked for. `verdict`: pass or fail. `score`: the part of the task that is done, as a
    reward in [0, 1]; only 1 passes."""

    images: int = Field(default=5, ge=2, le=64)
    """Largest number of screenshots that the judge sees: the first, the last, and others spread evenly
    between."""


class EnvConfig(Section):
    """The environments of one `dart env` process, and the tasks."""

    suite: str = "mini"
    """Name of a task suite, or your own as `package.module:Suite` or `file.py:Suite`."""

    tasks: list[str] = []
    """Tasks to train on: ids, patterns such as `miniwob/click-*`, and `!pattern` to leave tasks out. If
    empty, all tasks of the suite's training split."""

    heldout: list[str] = []
    """Tasks (ids, patterns) kept out of training, in addition to those that the suite holds out. `dart eval`
    reports them apart."""

    seeds: Annotated[tuple[int, int], Strict(False)] = (0, TRAIN_SEEDS)
    """Seeds of training instances: from the first number up to, but not including, the second."""

    slots: int = Field(default=16, ge=1, le=MOST_SLOTS)
    """Number of environments that one process plays at once."""

    options: dict[str, Any] = {}
    """Options that are passed to the environment, e.g. its resolution."""

    observe: list[Literal["screenshot", "accessibility", "terminal"]] = ["screenshot"]
    """What the policy sees of a screen: always the screenshot; beside it, as text, the accessibility tree or
    the content of a terminal, where the suite has them (docs/environments)."""

    screenshots: Literal["png", "webp", "jpeg"] = "png"
    """How screenshots are encoded, once, before the policy sees them. `png` leaves them as the suite gives
    them. `webp` is lossless and takes a third of that; `jpeg`, of quality 90, takes still less for
    photographs. Policy, store and trainer decode the same bytes (docs/environments)."""

    reset_deadline_s: PositiveSeconds = 60.0
    """Seconds that a reset may take; after that the episode is invalid and the slot gets a new environment.
    Time spent waiting for something that environments share, such as a turn to boot, does not count."""

    step_deadline_s: PositiveSeconds = 30.0
    """Seconds that an action may take, counted likewise. An action that ends its episode is evaluated at
    once, and may take `evaluate_deadline_s` more."""

    evaluate_deadline_s: PositiveSeconds = 60.0
    """Seconds that an evaluator may take, counted likewise."""

    isolation: Literal["thread", "process"] = "thread"
    """Where each environment runs. `thread` is cheap. A `process` can be killed when it hangs, and stops only
    its own slot when it crashes."""

    judge: JudgeConfig | None = None
    """A second model that judges the episodes of tasks without an evaluator, or checks the evaluators."""


def observed_kinds(env: EnvConfig) -> tuple[str, ...]:
    """Return the kinds of text in `env.observe`: all but the screenshot."""
    return tuple(kind for kind in env.observe if kind != "screenshot")
