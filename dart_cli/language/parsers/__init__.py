"""Action languages, one module each; see dart_cli/language/parsers/base.py.

compact    one call with integers 0-999: the tiny model's language
uitars     a thought, then one call: UI-TARS text
toolcall   tool calls in JSON and XML: Qwen2.5-VL, Qwen3-VL, Qwen3.5, GUI-Owl, MAI-UI, EvoCUA
pyautogui  Python code: OpenCUA, ScaleCUA
pyautogui_calls   its calls as actions, and the lines that are one action together
glm        a call in box tokens: GLM-4.5V
tools      the tools of tool calls
reading    what they share: names of keys, the LALR parser of the first two, calls with literal arguments

    make_action_parser     the action parser of a configured name (`policy.action_parser`)
    point_parser    the same, where it is a PointParser
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from bus.errors import ConfigError, TaskError
from dart_cli.config.schema import ACTION_PARSER_PARTS, ACTION_PARSERS, POINT_PARTS
from dart_cli.language.parsers.base import ActionParser, PointParser
from envs.contract.own_code import code_digest, load_own

_MODULES = {
    **dict.fromkeys(("toolcall", "toolcall-mobile", "toolcall-mai", "toolcall-xml"), "toolcall"),
    **dict.fromkeys(("pyautogui", "scalecua"), "pyautogui"),
    **{name: name for name in ("compact", "uitars", "glm")},
}
"""The module of each name; its ACTION_PARSERS make the action parser."""


@cache
def make_action_parser(name: str) -> ActionParser:
    """Return the action parser called `name`; built once. Raises ConfigError for an unknown name."""
    if name in _MODULES:
        module = import_module(f"dart_cli.language.parsers.{_MODULES[name]}")
        return cast("ActionParser", module.ACTION_PARSERS[name]())
    if ":" in name:
        return _own_parser(name)
    raise ConfigError(
        f"policy.action_parser must be {', '.join(ACTION_PARSERS)}, or your own as file.py:MyParser, got {name}"
    )


def action_parser_identity(name: str) -> str:
    """Return what tells one action parser from another: its name, of one of your own with a digest of its file."""
    code = code_digest(make_action_parser(name)) if ":" in name else ""
    return f"{name} {code}" if code else name


def _own_parser(name: str) -> ActionParser:
    try:
        action_parser = load_own("action parser", name, name)
    except TaskError as error:
        raise ConfigError(f"policy.action_parser: {error}") from error
    if not isinstance(action_parser, ActionParser):
        raise ConfigError(
            f"policy.action_parser: {name} is no ActionParser; it needs {', '.join(ACTION_PARSER_PARTS)}"
        )
    return action_parser


def point_parser(name: str) -> PointParser:
    """Return the action parser called `name`. Raises ConfigError where it does not tell its points."""
    action_parser = make_action_parser(name)
    if not isinstance(action_parser, PointParser):
        raise ConfigError(lacks_points(name))
    return action_parser


def lacks_points(name: str) -> str:
    """Return what to do with an action parser that does not tell its points, as one line."""
    return (
        f'policy.action_parser: {name} lacks {" and ".join(POINT_PARTS)}, which policy.pointing = "pointer" needs; '
        'add them (docs/policy.md), or set policy.pointing = "text"'
    )
