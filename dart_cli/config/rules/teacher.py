"""Rules about the model that the policy learns from, by its play or its scores: of [teacher], [teacher.policy]."""

from __future__ import annotations

import os
from functools import partial

from bus.errors import ConfigError, ModelError
from bus.temperatures import MIN_TEMPERATURE
from dart_cli.config.model_folder import model_folder
from dart_cli.config.model_folder import model_problem as folder_problem
from dart_cli.config.rules import Rule, Table, broken_rules, policy
from dart_cli.config.schema import Config
from dart_cli.config.teacher import (
    CANNOT_SCORE,
    lacks_family,
    scoring_problem,
    teacher_config,
    teachers_words,
)


def _without_url(config: Config, key: str) -> bool:
    """Return True if a key that is for servers is set, and there is no server."""
    return not config.teacher.url and bool(getattr(config.teacher, key))


def _temperature_problem(config: Config) -> bool:
    temperature = config.teacher.temperature
    return temperature is not None and 0 < temperature < MIN_TEMPERATURE


def _model_problem(config: Config) -> str:
    """Return the first broken rule of the teacher as a model of its own; empty if there is none."""
    try:
        own = teacher_config(config)
    except ConfigError as error:
        return str(error)
    tables = [policy.POLICY, policy.SCREENS]
    if not config.teacher.url:
        tables = [policy.MODEL, policy.OWN_ENGINE, policy.VLLM, *tables]
    for table in tables:
        if table.when(own):
            for finding in broken_rules(table, own):
                return teachers_words(str(finding))
    return ""


def _screens_problem(config: Config) -> bool:
    """Return True if the sizes of the teacher's screens are needed and no folder has them."""
    try:
        own = teacher_config(config)
    except ConfigError:  # another rule reports it
        return False
    return bool(own.policy.coordinates == "resized" and not config.teacher.model)


TEACHER = Table(
    (
        Rule(
            "teacher.model",
            lambda c: not c.teacher.is_set,
            "is empty: which model plays? Set it to a model folder, or set teacher.url and teacher.name",
            ends=True,
        ),
        Rule(
            "teacher.model",
            lambda c: not c.teacher.url and folder_problem(c.teacher.model),
            "{detail}",
            ends=True,
        ),
        Rule(
            "teacher.url",
            lambda c: c.teacher.url and policy.url_problem(c.teacher.url, "teacher.key_env"),
            "{detail}",
        ),
        Rule(
            "teacher.name",
            lambda c: c.teacher.url and not c.teacher.name,
            "is empty; set it to the model's name at the server",
            ends=True,
        ),
        *(
            Rule(
                f"teacher.{key}",
                partial(_without_url, key=key),
                "belongs to teacher.url; a model folder needs none, leave it out",
            )
            for key in ("name", "key_env", "budget_requests", "budget_tokens")
        ),
        Rule(
            "teacher.key_env",
            lambda c: (
                c.teacher.url
                and c.teacher.key_env
                and not os.environ.get(c.teacher.key_env, "").strip()
            ),
            "names {teacher.key_env}: no such environment variable, or it is empty",
        ),
        Rule(
            "teacher.temperature",
            _temperature_problem,
            f"must be 0 or >= {MIN_TEMPERATURE:g}, got {{value}}",
        ),
        Rule(
            "teacher.policy.family",
            lacks_family,
            "is unset: a server does not show the family of its model; set it (docs/families.md), or "
            "teacher.model to the model's folder",
            ends=True,
        ),
        Rule(
            "teacher.policy.coordinates",
            _screens_problem,
            '= "resized" needs the sizes of the teacher\'s preprocessor; set teacher.model to a folder with '
            "its config.json and preprocessor_config.json",
            ends=True,
        ),
        Rule("teacher.model", _model_problem, "cannot play: {detail}"),
    ),
    ("teacher",),
)


def _cannot_score(config: Config) -> str:
    """Return what is different in the teacher's folder from the policy's; empty if it can score its tokens."""
    if folder_problem(config.model.path):  # another rule reports it
        return ""
    folders = model_folder(config.model.path), model_folder(config.teacher.model)
    try:
        return scoring_problem(*folders)
    except ModelError as error:
        return f"has other files ({error})"


SCORES = Table(
    (
        Rule(
            "teacher.model",
            lambda c: not (c.teacher.model or c.teacher.hints),
            "is empty, and train.teacher_weight = {train.teacher_weight:g} needs a teacher: set it to a model "
            "folder of the same tokenizer, or set teacher.hints = true, if the suite has an oracle",
            ends=True,
        ),
        Rule(
            "teacher.url",
            lambda c: c.teacher.url,
            "gives no log-probabilities of the policy's tokens, which train.teacher_weight = "
            "{train.teacher_weight:g} needs; leave it out, and set teacher.model to a folder",
            ends=True,
        ),
        Rule(
            "teacher.model",
            lambda c: c.teacher.model and folder_problem(c.teacher.model),
            "{detail}",
            ends=True,
        ),
        Rule("teacher.model", lambda c: c.teacher.model and _cannot_score(c), CANNOT_SCORE),
    ),
    ("train",),
    lambda c: c.train.teacher_weight > 0 and c.train.learner == "torch",
)
