"""Rules about the model, its prompts and actions: of [policy], [model], [model.lora], [env.judge], [vllm]."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from urllib.parse import urlsplit

from bus.errors import ConfigError, ModelError, TaskError
from dart_cli.config.adapters import folder_problem, lora_problem
from dart_cli.config.architecture import MIXTURES, pointer_ids
from dart_cli.config.devices import VLLM_OWN, OwnKey, own_maker, vllm_problem
from dart_cli.config.model_folder import (
    BUILTIN,
    VERIFIER,
    folder_of,
    model_folder,
    model_problem,
    read_json,
    screens_of,
)
from dart_cli.config.rules import Rule, Table
from dart_cli.config.rules.machine import unreadable
from dart_cli.config.schema import (
    ACTION_PARSER_PARTS,
    MODEL_ENGINES,
    POINT_PARTS,
    SPLIT_PARSERS,
    SPLIT_PARTS,
    Config,
    JudgeConfig,
    PolicyConfig,
)
from dart_cli.config.values import short_value
from envs.contract.actions import Click, Done, Type
from envs.contract.own_code import load_own


def needs_model(config: Config) -> bool:
    """Return True if a process of the run loads the model; scripted engines do not."""
    return config.rollout.engine in MODEL_ENGINES or config.train.learner == "torch"


def is_mixture(config: Config) -> bool:
    """Return True if the model is a mixture of experts. The rules of [model] report a folder without a config."""
    folder = folder_of(config)
    if folder is None:
        return False
    with contextlib.suppress(ModelError):
        return read_json(folder, "config.json").get("model_type") in MIXTURES
    return False


# --- [policy]


def _parser_problem(config: Config) -> str:
    """Return why the user's own action parser cannot be used; empty if it can."""
    policy = config.policy
    name = policy.action_parser
    if ":" not in name:
        return ""
    try:
        action_parser = load_own("action parser", name, name)
        lacking = [part for part in ACTION_PARSER_PARTS if not hasattr(action_parser, part)]
        no_points = [part for part in POINT_PARTS if not hasattr(action_parser, part)]
        no_parts = [part for part in SPLIT_PARTS if not hasattr(action_parser, part)]
    except TaskError as error:
        return f"cannot be used: {error}"
    except Exception as error:  # noqa: BLE001 - a property of the user's class
        return f"= {short_value(name)} cannot be used: {type(error).__name__}: {error}"
    if lacking:
        return f"= {short_value(name)} lacks {', '.join(lacking)}; docs/policy.md has one in full"
    if no_points and policy.pointing == "pointer":
        return (
            f'= {short_value(name)} lacks {" and ".join(no_points)}, which policy.pointing = "pointer" needs; add '
            'them (docs/policy.md), or set policy.pointing = "text"'
        )
    if no_parts and policy.max_actions > 1:
        return (
            f"= {short_value(name)} lacks {' and '.join(no_parts)}, which policy.max_actions = "
            f"{policy.max_actions} needs; add them (docs/policy.md), or set policy.max_actions = 1"
        )
    if policy.history_images_most and (change := _changed_in_history(action_parser)):
        return (
            f"= {short_value(name)} cannot be used with policy.history_images_most, which shows past "
            f"completions as they were sampled: its as_history turns {change}; "
            "set policy.history_images_most = 0, or let as_history return its text"
        )
    return ""


class _AsIs:
    """A coordinate map that changes nothing, to try an action parser with."""

    def to_screen(self, x: int, y: int) -> tuple[int, int]:
        return x, y

    def to_model(self, x: int, y: int) -> tuple[int, int]:
        return x, y


def _changed_in_history(action_parser: Any) -> str:
    """Return a completion that the action parser changes in the history, and into what; empty without one."""
    for action in (Click(x=500, y=300), Type(text="a"), Done()):
        with contextlib.suppress(Exception):  # not every language has every action
            text = action_parser.format(action, _AsIs(), thought="Now this.")
            changed = action_parser.as_history(text)
            if changed != text:
                return f"{short_value(text)} into {short_value(changed)}"
    return ""


def _past(policy: PolicyConfig) -> int:
    """Return how many screenshots of past steps a prompt shows."""
    return policy.history_images - 1


POLICY = Table(
    (
        Rule(
            "policy.history_images_most",
            lambda c: (
                0 < c.policy.history_images_most <= c.policy.history_images
                and 2 * c.policy.history_images + 1
            ),
            "must be 0 or > policy.history_images ({policy.history_images}), got {value}; set e.g. {detail}",
        ),
        Rule(
            "policy.history_images",
            lambda c: _past(c.policy) > c.policy.history_turns and _past(c.policy),
            "= {value} shows {detail} past screenshots but policy.history_turns keeps "
            "{policy.history_turns} turns; set policy.history_turns >= {detail}",
        ),
        Rule(
            "policy.template",
            lambda c: "{instruction}" not in c.policy.template + c.policy.system_prompt,
            "needs {{instruction}} where the task belongs (or policy.system_prompt has it), got {value}",
        ),
        Rule("policy.action_parser", _parser_problem, "{detail}"),
        Rule(
            "policy.max_actions",
            lambda c: (
                c.policy.max_actions > 1
                and ":" not in c.policy.action_parser
                and c.policy.action_parser not in SPLIT_PARSERS
            ),
            'must be 1 with policy.action_parser = "{policy.action_parser}", whose completions are one action '
            "each, got {value}",
        ),
        Rule(
            "policy.coordinates",
            lambda c: c.policy.action_parser == "compact" and c.policy.coordinates != "thousandths",
            'must be "thousandths" with policy.action_parser = "compact", which writes numbers 0-999, got {value}',
        ),
        Rule(
            "policy.coordinates",
            lambda c: (
                c.policy.coordinates == "unit"
                and c.policy.action_parser not in ("pyautogui", "scalecua")
                and ":" not in c.policy.action_parser
            ),
            '= "unit" needs an action parser that reads decimals: policy.action_parser = "pyautogui", got '
            '"{policy.action_parser}"',
        ),
        Rule(
            "policy.action_parser",
            lambda c: (
                c.model.path in BUILTIN and c.policy.action_parser != "compact" and needs_model(c)
            ),
            'must be "compact", the only action language of model.path = "{model.path}", got {value}',
        ),
        Rule(
            "policy.verifier",
            lambda c: c.policy.verifier and c.policy.pointing != "pointer",
            'chooses among the candidates of a policy that points; set policy.pointing = "pointer", or '
            "leave it out",
        ),
    )
)


# --- [model], with the parts of [policy] that read its folder


def _no_head(config: Config) -> bool:
    """Return True if the policy points and its model has no pointer head."""
    points = config.policy.pointing == "pointer"
    return points and pointer_ids(read_json(model_folder(config.model.path), "config.json")) is None


def _no_verifier(config: Config) -> str:
    """Return why `policy.verifier` cannot be used, and the fix; empty if it can or is unset."""
    path = config.policy.verifier
    if not path or config.policy.pointing != "pointer":
        return ""
    if problem := model_problem(path):
        return problem
    if (model_folder(path) / VERIFIER).is_file():
        return ""
    return (
        f"= {short_value(path)} is no verifier: it has no {VERIFIER}; train one with `dart tune --data "
        "ROWS --model MODEL --out OUT`"
    )


def _no_screens(config: Config) -> str:
    """Return why `resized` coordinates cannot be computed here; empty if they can or are not used."""
    if config.policy.coordinates != "resized":
        return ""
    try:
        screens_of(config)
    except ModelError as error:
        return str(error)
    return ""


SCREENS = Table(
    (
        Rule(
            "policy.coordinates",
            _no_screens,
            '= "resized" needs the preprocessor of model.path on every host that plays: {detail}',
        ),
    ),
    ("env", "serve"),
)
MODEL = Table(
    (
        Rule(
            "model.path",
            lambda c: unreadable(model_folder(c.model.path)),
            "cannot be read: {detail}; choose another, got {value}",
            ends=True,
        ),
        Rule("model.path", lambda c: model_problem(c.model.path), "{detail}", ends=True),
        Rule("model.lora", lambda c: c.model.lora and lora_problem(), "cannot be used: {detail}"),
        Rule(
            "model.adapters",
            lambda c: c.model.adapters and not c.model.lora,
            "needs [model.lora] with the rank and alpha of its adapters",
        ),
        Rule(
            "model.adapters",
            lambda c: (
                c.model.adapters and c.model.lora and folder_problem(c.model.adapters, c.model.lora)
            ),
            "{detail}",
        ),
        Rule(
            "policy.pointing",
            _no_head,
            '= "pointer" needs a pointer head, which model.path = "{model.path}" has not; make a folder '
            "that has one with `dart model add-pointer {model.path} OUT` and name that",
        ),
        Rule("policy.verifier", _no_verifier, "{detail}"),
    ),
    ("rollout", "train", "eval", "tune"),
    needs_model,
)
SERVED = Table(
    (
        Rule(
            "policy.pointing",
            lambda c: c.policy.pointing == "pointer" and c.model.lora,
            '= "pointer" trains the pointer head and the embeddings of its tokens, which model.lora '
            "leaves as they are; remove [model.lora]",
        ),
        Rule(
            "policy.pointing",
            lambda c: c.policy.pointing == "pointer" and c.rollout.engine == "vllm",
            '= "pointer" is not served by rollout.engine = "vllm", which keeps no screen for the head '
            '(docs/pointing.md#vllm); set rollout.engine = "transformers"',
        ),
    ),
    ("rollout", "train", "eval"),
)


def _own_problem(key: OwnKey, name: str) -> str:
    """Return why the user's own engine or learner cannot be used; empty if it can."""
    if ":" not in name:
        return ""
    try:
        own_maker(key, name)
    except ConfigError as error:
        return str(error).removeprefix(f"{key} ")
    return ""


OWN_ENGINE = Table(
    (
        Rule(
            "rollout.engine", lambda c: _own_problem("rollout.engine", c.rollout.engine), "{detail}"
        ),
    ),
    ("rollout", "eval"),
)
OWN_LEARNER = Table(
    (Rule("train.learner", lambda c: _own_problem("train.learner", c.train.learner), "{detail}"),),
    ("train",),
)
VLLM = Table(
    (
        Rule(
            "vllm.options",
            lambda c: ", ".join(sorted(VLLM_OWN & c.vllm.options.keys())),
            "may not set {detail}: dart sets it; [vllm] and [rollout] have fields for what can be chosen",
        ),
        Rule(
            "rollout.device",
            lambda c: (
                c.vllm.tensor_parallel > 1
                and (c.rollout.device == "cpu" or ":" in c.rollout.device)
            ),
            "= {value} is one device, vllm.tensor_parallel = {vllm.tensor_parallel} needs "
            '{vllm.tensor_parallel}; set "cuda" and choose by CUDA_VISIBLE_DEVICES',
        ),
        Rule(
            "rollout.engine",
            is_mixture,
            '= "vllm" does not say which experts it chose for the screens and tokens of model.path = {model.path}, a '
            'mixture of experts (docs/policy.md#mixtures-of-experts); set rollout.engine = "transformers"',
        ),
        Rule("rollout.engine", lambda _: vllm_problem(), '= "vllm": {detail}'),
    ),
    ("rollout", "eval"),
    lambda c: c.rollout.engine == "vllm",
)


# --- [env.judge]


def _judge(config: Config) -> JudgeConfig:
    """Return the judge of a configuration, or a valid one where there is none."""
    return config.env.judge or JudgeConfig(model="builtin:tiny")


def url_problem(url: str, key_variable: str) -> str:
    """Return why `url` is no base URL of a chat API; empty if it is one. `key_variable` is the key's key."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        return f"must be a base URL such as http://localhost:8000/v1, got {url!r}"
    if parts.username or parts.password or parts.query or parts.fragment:
        return f"must have no user, key or query; the key is read from the variable {key_variable}"
    return ""


JUDGE = Table(
    (
        Rule(
            "env.judge.model",
            lambda c: not _judge(c).model,
            "is empty: which model judges? With url as the server calls it, else a model folder",
            ends=True,
        ),
        Rule(
            "env.judge.key_env",
            lambda c: _judge(c).key_env and not _judge(c).url,
            "belongs to env.judge.url; a model folder needs no key",
        ),
        Rule(
            "env.judge.model",
            lambda c: not _judge(c).url and model_problem(_judge(c).model),
            "{detail}; or set env.judge.url for a model behind a server",
        ),
        Rule(
            "env.judge.url",
            lambda c: _judge(c).url and url_problem(_judge(c).url, "env.judge.key_env"),
            "{detail}",
        ),
        Rule(
            "env.judge.key_env",
            lambda c: (
                _judge(c).url
                and _judge(c).key_env
                and not os.environ.get(_judge(c).key_env, "").strip()
            ),
            "names {env.judge.key_env}: no such environment variable, or it is empty",
        ),
    ),
    ("env", "eval"),
)
