"""Action parsers: each turns the texts of one action language into actions, and actions into texts.

base              the interface of an action parser (start here)
compact           one call with integers 0-999: the language of the tiny model
uitars            a thought, then one call: UI-TARS text
toolcall          tool calls in JSON or XML: Qwen2.5-VL to Qwen3.8, GUI-Owl, MAI-UI, EvoCUA, Fara1.5
pyautogui         Python code: OpenCUA, ScaleCUA
glm               a call in box tokens: GLM-4.5V
venus             a call in <action> tags: UI-Venus-2, UI-Venus-1.5
holo              an object of JSON: Holo3.1
pyautogui_calls   reads the calls of Python code as actions, where several lines may be one action
tools             the tools of tool calls
fara              the tool of Fara1.5
venus_calls       the calls of UI-Venus in three dialects
reading           the shared parts: names of keys, an LALR grammar, calls with literal arguments
several           completions of several actions, in the languages that have them

    make_action_parser       returns the action parser of a name (`policy.action_parser`)
    point_parser             returns the action parser of a name; raises ConfigError if it is no PointParser
    lacks_points             returns the message for an action parser that is no PointParser
    action_parser_identity   returns a text that tells two action parsers apart
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from bus.errors import ConfigError, TaskError
from dart_cli.config.schema import (
    ACTION_PARSER_PARTS,
    ACTION_PARSERS,
    POINT_PARTS,
    SPLIT_PARTS,
)
from dart_cli.language.parsers.base import ActionParser, PointParser, SplitParser
from dart_cli.language.parsers.several import several
from envs.contract.own_code import code_digest, load_own

_MODULES = {
    **dict.fromkeys(
        ("toolcall", "toolcall-mobile", "toolcall-mai", "toolcall-fara", "toolcall-xml"), "toolcall"
    ),
    **dict.fromkeys(("pyautogui", "scalecua"), "pyautogui"),
    **dict.fromkeys(("venus", "venus-web", "venus-mobile"), "venus"),
    **{name: name for name in ("compact", "uitars", "glm", "holo")},
}
"""The module of each name. Its ACTION_PARSERS has a factory for each of the module's names."""


@cache
def make_action_parser(name: str, most: int = 1) -> ActionParser:
    """Return the action parser of this name for completions of at most `most` actions; it is made once.

    Raises ConfigError for an unknown name, and for a language without completions of several actions.
    """
    if most > 1:
        language = make_action_parser(name)
        if isinstance(language, SplitParser):
            return several(language, most)
        raise ConfigError(
            f"policy.max_actions: {name} lacks {' and '.join(SPLIT_PARTS)}, which several actions need; set it to 1"
        )
    if name in _MODULES:
        module = import_module(f"dart_cli.language.parsers.{_MODULES[name]}")
        return cast("ActionParser", module.ACTION_PARSERS[name]())
    if ":" in name:
        return _own_parser(name)
    raise ConfigError(
        f"policy.action_parser must be {', '.join(ACTION_PARSERS)}, or your own as file.py:MyParser, "
        f"got {name}"
    )


def action_parser_identity(name: str) -> str:
    """Return the name of an action parser, with a digest of its file if it is a user's own."""
    code = code_digest(make_action_parser(name)) if ":" in name else ""
    return f"{name} {code}" if code else name


def _own_parser(name: str) -> ActionParser:
    try:
        parser = load_own("action parser", name, name)
    except TaskError as error:
        raise ConfigError(f"policy.action_parser: {error}") from error
    if not isinstance(parser, ActionParser):
        raise ConfigError(
            f"policy.action_parser: {name} is no ActionParser; it needs {', '.join(ACTION_PARSER_PARTS)}"
        )
    return parser


def point_parser(name: str, most: int = 1) -> PointParser:
    """Return the action parser of this name, for completions of at most `most` actions.

    Raises ConfigError as `make_action_parser` does, and if it cannot find the points of a text.
    """
    parser = make_action_parser(name, most)
    if not isinstance(parser, PointParser):
        raise ConfigError(lacks_points(name))
    return parser


def lacks_points(name: str) -> str:
    """Return the message, with the fix, for an action parser that cannot find the points of a text."""
    return (
        f"policy.action_parser: {name} lacks {' and '.join(POINT_PARTS)}, which "
        'policy.pointing = "pointer" needs; add them (docs/policy.md), or set policy.pointing = "text"'
    )
