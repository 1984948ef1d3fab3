"""Everything on which the outcome of an evaluation's episodes depends: configuration, model and suite.

settings_of   digests of model, weights and suite, and keys of the configuration
dart_version  the version of dart, with its commit in a checkout
left_out_of   tasks that the suite cannot play on this host
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dart_cli
from bus.errors import ModelError
from dart_cli.config.model_folder import BUILTIN, model_folder
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.evaluation.episodes import step_limit
from dart_cli.evaluation.results import EvalSettings
from dart_cli.language.parsers import action_parser_identity
from dart_cli.weights.folder import folder_digest
from envs.contract.base import Task
from envs.contract.own_code import code_digest
from envs.contract.registry import load_suite

_INDIFFERENT = frozenset(
    {
        "env.suite",  # EvalSettings has a field for it
        "env.tasks",
        "env.heldout",
        "env.seeds",
        "env.slots",
        "env.isolation",
        "env.reset_deadline_s",
        "env.step_deadline_s",
        "env.evaluate_deadline_s",
    }
)
"""Keys of [env] and [policy] on which no verdict depends."""
_OTHERS = (
    "model.dtype",
    "model.lora",
    "model.adapters",
    "rollout.engine",
    "rollout.temperature",
    "rollout.max_tokens",
    "run.seed",
)
"""Keys of other sections on which verdicts may depend."""
_OF_VLLM = ("vllm.options", "vllm.max_model_len")
"""Keys on which verdicts may depend with the engine vLLM, e.g. because its options quantise the model."""
_GIT_S = 5.0


def settings_of(config: Config, weights: Path | None, *, with_model: bool) -> EvalSettings:
    """Return the settings of a configuration. `with_model` is false if no model plays the episodes.

    Raises ModelError or WeightsError if the model folder or the weight set cannot be read.
    """
    dumped = config.model_dump(mode="json")
    keys = [f"{section}.{key}" for section in ("env", "policy") for key in dumped[section]]
    values = {key: _value(dumped, key) for key in (*keys, *_OTHERS) if key not in _INDIFFERENT}
    values["policy.action_parser"] = action_parser_identity(config.policy.action_parser)
    values["eval.max_steps"] = step_limit(config)
    if config.rollout.engine == "vllm":
        values |= {key: _value(dumped, key) for key in _OF_VLLM}
    if (judge := config.env.judge) is not None and not judge.url:
        values["env.judge.folder"] = _folder_digest(judge.model)
    model = weight_set = ""
    if with_model and config.rollout.engine in MODEL_ENGINES:
        model = _model_digest(config)
        weight_set = _weights_digest(weights) if weights is not None else ""
    elif not with_model:
        values = {key: value for key, value in values.items() if not key.startswith("model.")}
    return EvalSettings(
        suite=config.env.suite,
        suite_digest=_suite_digest(config.env.suite),
        model_digest=model,
        weights_digest=weight_set,
        values=values,
    )


def dart_version() -> str:
    """Return `0.1.0`, or `0.1.0 at 0123456789ab` in a checkout, with `-dirty` if files were changed."""
    folder = Path(dart_cli.__file__).parent
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        process = subprocess.run(
            [*describe, "--exclude=*"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return dart_cli.__version__
    return f"{dart_cli.__version__} at {process.stdout.strip()}"


def left_out_of(suite: str) -> dict[str, str]:
    """Return task id -> why the suite cannot play it; empty if the suite has no such list."""
    left_out = getattr(load_suite(suite), "left_out", None)
    if not isinstance(left_out, Mapping):
        return {}
    return {str(task_id): str(reason) for task_id, reason in left_out.items()}


def _value(dumped: Mapping[str, Any], key: str) -> object:
    """Return the value of `section.key` in a dumped configuration."""
    section, _, name = key.partition(".")
    value: object = dumped[section][name]
    return value


def _suite_digest(suite: str) -> str:
    """Return a digest of the suite's tasks, their step limits and their evaluators."""
    loaded = load_suite(suite)
    tasks = sorted(
        (_task_parts(task) for task in loaded.tasks.values()), key=lambda parts: str(parts[0])
    )
    text = json.dumps(tasks, default=_stable_text, sort_keys=True)
    code = code_digest(loaded) if ":" in suite else ""
    return hashlib.blake2b(f"{text}{code}".encode(), digest_size=8).hexdigest()


def _stable_text(value: object) -> str:
    """Return a text for a value that JSON lacks.

    It is the type of an object, because the text of an object may have its address in memory.
    """
    return str(value) if isinstance(value, Path) else type(value).__qualname__


def _with_text_keys(value: object) -> object:
    """Return a value with all keys as texts, because JSON cannot sort keys of different types."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    return value


def _task_parts(task: Task) -> list[object]:
    """Return the parts of a task on which an episode depends; `params` has the set-up and the evaluator."""
    parts: list[object] = [task.id, task.instruction, task.max_steps, task.feasible]
    if task.params:
        parts.append(_with_text_keys(task.params))
    if not task.evaluated:
        parts.append("without an evaluator")
    return parts


def _model_digest(config: Config) -> str:
    """Return a digest of the model folder, with its adapters and the verifier if they are set."""
    digests = [_folder_digest(config.model.path, config.model.adapters)]
    if config.policy.verifier:
        digests.append(_folder_digest(config.policy.verifier))
    if len(digests) == 1:
        return digests[0]
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def _folder_digest(name: str, adapters: str = "") -> str:
    """Return a digest of the files of a model folder. Raises ModelError if there is no such folder."""
    folder = BUILTIN.get(name) or model_folder(name)
    if not folder.is_dir():
        raise ModelError(f"{name}: there is no such folder; name the folder of a model")
    return folder_digest(folder, adapters)


def _weights_digest(directory: Path) -> str:
    """Return the digest of a weight set's manifest, which has a digest of each tensor."""
    from dart_cli.weights.manifest import published, read_manifest

    return str(published(directory, read_manifest(directory)).digest)
