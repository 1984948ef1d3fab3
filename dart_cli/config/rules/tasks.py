"""Rules about what is played: of [env] and of the lists of tasks. Some of them load the user's suite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from bus.errors import MissingPartError, TaskError
from dart_cli.config.rules import Condition, Rule, Table, twice, value_of
from dart_cli.config.schema import TRAIN_SEEDS, Config, JudgeConfig, observed_kinds
from dart_cli.config.task_split import evaluated_tasks, training_tasks
from dart_cli.config.values import short_value
from envs.contract.base import Task
from envs.contract.registry import (
    SHIPPED,
    check_observe,
    check_options,
    check_parts,
    find_task,
    is_pattern,
    load_suite,
    longest_reset_s,
    make_env,
    select_tasks,
)

logger = logging.getLogger(__name__)

_LISTS = ("env.tasks", "env.heldout", "eval.tasks")
_SELECTIONS: dict[str, Callable[[Config], list[Task]]] = {
    "env.tasks": training_tasks,
    "eval.tasks": evaluated_tasks,
}

ENV = Table(
    (
        Rule(
            "env.seeds",
            lambda c: not 0 <= c.env.seeds[0] < c.env.seeds[1] <= TRAIN_SEEDS,
            f"must be [first, end] with 0 <= first < end <= {TRAIN_SEEDS}, from where seeds are for "
            "evaluation, got {value}",
        ),
        Rule(
            "env.observe",
            lambda c: "screenshot" not in c.env.observe,
            'must have "screenshot", got {value}; add it',
        ),
        *map(twice, ("env.observe", *_LISTS)),
        Rule(
            "env.screenshots",
            lambda c: (
                c.env.screenshots != "png"
                and (before := c.env.options.get("encoding", "png"))
                not in ("png", c.env.screenshots)
                and short_value(before)
            ),
            "is {value}, but env.options.encoding = {detail} has lost detail before; remove that option",
        ),
    )
)


def _one_line(error: BaseException) -> str:
    """Return an error with its class in one line of at most 200 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def _suite_problem(config: Config) -> str:
    """Return why `env.suite` cannot be loaded; empty if it can."""
    suite = config.env.suite
    try:
        load_suite(suite)
    except TaskError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
        return f"importing {suite} failed, fix it: {_one_line(error)}"
    return ""


def _refused(check: Callable[[Config], object]) -> Condition:
    """Return the condition that a check of the suite raises TaskError; its detail is the message."""

    def broken(config: Config) -> str:
        try:
            check(config)
        except TaskError as error:
            return str(error)
        return ""

    return broken


def _unknown(config: Config, key: str) -> list[str]:
    """Return the errors for names and patterns of a list that fit no task of the suite."""
    errors = []
    for pattern in value_of(config, key):
        try:
            select_tasks(config.env.suite, [pattern])
        except TaskError as error:
            errors.append(str(error))
    return errors


def _unknown_task(key: str) -> Rule:
    """Return the rule that every name and pattern of a list fits a task of the suite."""

    def broken(config: Config) -> str:
        wrong = _unknown(config, key)
        # If none is known, they are probably tasks of the suite that was configured before.
        all_of_them = len(wrong) == len(value_of(config, key))
        fix = f"; if they are another suite's, set {key}=[] for all" if all_of_them else ""
        return f"{wrong[0]}{fix}" if wrong else ""

    return Rule(key, broken, "cannot be used: {detail}")


def _is_known(config: Config) -> bool:
    """Return True if all lists name tasks of the suite; otherwise they cannot be split."""
    return not any(_unknown(config, key) for key in _LISTS)


def _held_out(config: Config) -> str:
    """Return a task that env.tasks names in full although its suite holds it out; empty without one."""
    if not _is_known(config):
        return ""
    ids = (name for name in config.env.tasks if not is_pattern(name))
    return next((t for t in ids if find_task(config.env.suite, t).split == "heldout"), "")


def _held_here(config: Config) -> str:
    """Return a task that env.tasks names in full although env.heldout holds it out; empty without one."""
    if not config.env.heldout or not _is_known(config):
        return ""
    heldout = {task.id for task in select_tasks(config.env.suite, config.env.heldout)}
    ids = (t for t in config.env.tasks if not is_pattern(t) and t in heldout)
    return next((t for t in ids if find_task(config.env.suite, t).split != "heldout"), "")


def _selection_rule(key: str) -> Rule:
    """Return the rule that a list selects tasks, and that each of them is evaluated or judged."""

    def broken(config: Config) -> str:
        if not _is_known(config):
            return ""
        try:
            tasks = _SELECTIONS[key](config)
        except TaskError as error:
            return f"cannot be used: {error}"
        return unjudged_problem(config.env.judge, tasks)

    return Rule(key, broken, "{detail}")


def unjudged_problem(judge: JudgeConfig | None, tasks: Sequence[Task]) -> str:
    """Return the error for tasks that have neither an evaluator nor a judge; empty if there are none."""
    without = [task.id for task in tasks if not task.evaluated]
    if judge is not None or not without:
        return ""
    more = f" and {len(without) - 1} others" if len(without) > 1 else ""
    return (
        f"has {without[0]}{more} without an evaluator: add [env.judge] with a model that judges them, "
        "or leave them out"
    )


_SUITE = Rule("env.suite", _suite_problem, "cannot be used: {detail}", ends=True)

TASKS = Table(
    (
        _SUITE,
        Rule(
            "env.options",
            _refused(lambda c: check_options(c.env.suite, c.env.options)),
            "cannot be used: {detail}",
        ),
        Rule(
            "env.observe",
            _refused(lambda c: check_observe(c.env.suite, observed_kinds(c.env))),
            "cannot be used: {detail}",
        ),
        *map(_unknown_task, _LISTS),
        Rule(
            "env.tasks",
            _held_out,
            "holds {detail!r}, which its suite keeps out of training; remove it: `dart eval` plays it",
        ),
        Rule(
            "env.heldout",
            _held_here,
            "names {detail!r}, which env.tasks trains on; remove it from one of them",
        ),
        *map(_selection_rule, _SELECTIONS),
    ),
    ("env", "serve", "data", "eval"),
)


# --- where environments are played: what they need is installed, and takes its options


def _making_error(config: Config) -> Exception | None:
    """Return the error of making an environment, without starting it; None if it can be made.

    The user's own environment is not made here where env.isolation puts it into a process.
    """
    suite, options = config.env.suite, config.env.options
    is_apart = config.env.isolation == "process" and suite not in SHIPPED
    if not options or is_apart or not _is_usable(config):
        return None
    try:
        make_env(suite, **options).close()
    except (TaskError, TypeError, ValueError, MissingPartError) as error:
        return error
    except Exception as error:  # noqa: BLE001 - not a mistake of the configuration: it may pass
        logger.warning(
            "suite %s cannot make an environment now (%s); until it can, its episodes are invalid; "
            "`dart env check` shows more",
            suite,
            _one_line(error),
        )
    return None


def _is_usable(config: Config) -> bool:
    """Return True if the suite can be loaded and accepts its options and texts."""
    usable = TASKS.rows[:3]
    return not any(broken(config) for _, broken, *_ in usable)


def _refused_option(config: Config) -> str:
    """Return the error of the environment about its options; empty if it accepts them."""
    match _making_error(config):
        case MissingPartError() | None:
            return ""
        case TaskError() as error:
            return str(error)
        case error:
            return _one_line(error)


def _longest_reset(config: Config) -> str:
    """Return the seconds that the suite allows a reset, if the deadline is not longer; empty if it is."""
    env = config.env
    try:
        longest_s = longest_reset_s(env.suite, env.options) if _is_usable(config) else 0.0
    except TaskError:  # reported by the rule of `env.options`
        return ""
    return f"{longest_s:g}" if longest_s >= env.reset_deadline_s else ""


def _longest_reset_problem(config: Config) -> str:
    """Return why the suite cannot tell how long a reset takes; empty where its options are refused anyway."""
    if not _is_usable(config):
        return ""
    try:
        longest_reset_s(config.env.suite, config.env.options)
    except TaskError as error:
        return "" if _refused_option(config) else str(error)
    return ""


def _missing_part(config: Config) -> str:
    """Return which package or program the suite lacks on this host, and the fix; empty if none."""
    env = config.env
    if _suite_problem(config):
        return ""
    if isinstance(error := _making_error(config), MissingPartError):
        return str(error)
    try:
        check_parts(env.suite, env.options, _task_ids(config), observed_kinds(env))
    except MissingPartError as missing:
        return str(missing)
    return ""


def _task_ids(config: Config) -> set[str] | None:
    """Return the ids of all tasks that are trained on or evaluated; None where they cannot be selected."""
    try:
        return {task.id for tasks in _SELECTIONS.values() for task in tasks(config)}
    except TaskError:
        return None


PLAYED = Table(
    (
        Rule("env.options", _refused_option, "cannot be used: {detail}"),
        Rule(
            "env.reset_deadline_s",
            _longest_reset,
            "must be > {detail}, the seconds that suite {env.suite} gives a reset (a boot, a browser) by its "
            "options, got {value}; raise it, or a reset is given up while its environment starts",
        ),
        Rule("env.suite", _longest_reset_problem, "cannot be used: {detail}"),
        Rule("env.suite", _missing_part, "= {value} cannot be played here: {detail}"),
    ),
    ("env", "eval"),
)
