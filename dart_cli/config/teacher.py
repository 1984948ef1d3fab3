"""The teacher of a configuration as a configuration of its own, so that all else can treat it as a model.

teacher_config     returns the configuration of the teacher
scoring_problem    returns why a teacher's folder cannot score the policy's tokens, by its small files
teachers_words     returns a message about that configuration with the names of the keys in [teacher]
lacks_family       returns True if nothing says how the teacher is prompted
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bus.errors import ConfigError, ModelError
from dart_cli.config.families import AUTO, FAMILY_KEY, VALUES, with_family
from dart_cli.config.model_folder import TOKENIZER, preprocessor, read_json, screens
from dart_cli.config.schema import Config, ModelConfig, PolicyConfig

CANNOT_SCORE = (
    "= {teacher.model!r} {detail} than model.path = {model.path!r}; a teacher scores the policy's own tokens: "
    "choose one of the same tokenizer and screens, or let it play (`dart data collect --from teacher`)"
)
"""The end of an error that begins with "teacher.model"; `detail` says what is different in that folder."""

_KEYS = {
    "model.path": "teacher.model",
    "rollout.engine": "teacher.engine",
    "rollout.max_tokens": "teacher.max_tokens",
}


def teacher_config(config: Config) -> Config:
    """Return the configuration whose [model], [policy] and [rollout] are the teacher's.

    Raises ConfigError for an unknown family, and for a folder that shows none.
    """
    teacher = config.teacher
    section = teacher.policy or PolicyConfig()
    policy = section
    if "family" not in section.model_fields_set:
        policy = section.model_copy(update={"family": AUTO})
        object.__setattr__(policy, "__pydantic_fields_set__", set(section.model_fields_set))
    # A server's model has no folder; its name takes the place, and nothing is read there.
    path = teacher.model or teacher.name
    whole = config.model_copy(
        update={
            "model": ModelConfig(path=path, dtype=config.model.dtype),
            "policy": policy,
            "rollout": config.rollout.model_copy(
                update={"engine": teacher.engine, "max_tokens": teacher.max_tokens}
            ),
        }
    )
    try:
        return with_family(whole)
    except ConfigError as mistake:
        raise ConfigError(teachers_words(f"{FAMILY_KEY} {mistake}")) from None


def scoring_problem(policy: Path, teacher: Path) -> str:
    """Return what is different in a teacher's folder from the policy's; empty if their small files agree.

    The text is followed by "than" and the policy's folder. Tokens with their numbers, and sizes of patches and
    screens are compared; the trainer compares more (check_teacher). Raises ModelError for an unreadable file.
    """
    if _tokens(policy) != _tokens(teacher):
        return "has another tokenizer"
    ways = [
        (screens(folder), preprocessor(folder).get("patch_size", 14))
        for folder in (policy, teacher)
    ]
    return "" if ways[0] == ways[1] else "prepares screens otherwise"


def _tokens(folder: Path) -> Any:
    """Return the tokens of a folder's tokenizer and their numbers, as they are in its file."""
    tree = read_json(folder, TOKENIZER)
    model, added = tree.get("model"), tree.get("added_tokens")
    if not isinstance(model, dict) or not isinstance(added or [], list):
        raise ModelError(
            f"{folder / TOKENIZER} has no model; copy it again from the model's source"
        )
    return model.get("vocab"), {
        token.get("content"): token.get("id") for token in added or [] if isinstance(token, dict)
    }


def teachers_words(text: str) -> str:
    """Return a message about `teacher_config` with the names that its keys have in [teacher]."""
    for key, ours in _KEYS.items():
        text = re.sub(rf"(?<![\w.]){re.escape(key)}\b", ours, text)
    return re.sub(r"(?<![\w.])policy\.(?=[a-z_]+\b)", "teacher.policy.", text)


def lacks_family(config: Config) -> bool:
    """Return True if nothing says how the teacher is prompted: no family, no folder, no values."""
    teacher = config.teacher
    keys = (teacher.policy or PolicyConfig()).model_fields_set
    is_shown = bool(teacher.model) or "family" in keys or keys.issuperset(VALUES)
    return teacher.is_set and not is_shown
