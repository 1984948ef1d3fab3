"""Action languages, one module each; see dart_cli/policy/codec.py.

compact    one call with integers 0-999: the tiny model's language
uitars     a thought, then one call: UI-TARS text
toolcall   tool calls in JSON and XML: Qwen2.5-VL, Qwen3-VL, Qwen3.5, GUI-Owl, MAI-UI, EvoCUA
pyautogui  Python code: OpenCUA, ScaleCUA
pyautogui_calls   its calls as actions, and the lines that are one action together
glm        a call in box tokens: GLM-4.5V
tools      the tools of tool calls
reading    what they share: names of keys, the LALR parser of the first two, calls with literal arguments

    make_codec     the codec of a configured name (`policy.codec`)
    point_codec    the same, where it is a PointCodec
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from bus.errors import ConfigError, TaskError
from dart_cli.config.schema import CODEC_PARTS, CODECS, POINT_PARTS
from dart_cli.policy.codec import Codec, PointCodec
from envs.own_code import code_digest, load_own

_MODULES = {
    **dict.fromkeys(("toolcall", "toolcall-mobile", "toolcall-mai", "toolcall-xml"), "toolcall"),
    **dict.fromkeys(("pyautogui", "scalecua"), "pyautogui"),
    **{name: name for name in ("compact", "uitars", "glm")},
}
"""The module of each name; its CODECS make the codec."""


@cache
def make_codec(name: str) -> Codec:
    """Return the codec called `name`; built once. Raises ConfigError for an unknown name."""
    if name in _MODULES:
        module = import_module(f"dart_cli.policy.codecs.{_MODULES[name]}")
        return cast("Codec", module.CODECS[name]())
    if ":" in name:
        return _own_codec(name)
    raise ConfigError(
        f"policy.codec must be {', '.join(CODECS)}, or your own as file.py:MyCodec, got {name}"
    )


def codec_identity(name: str) -> str:
    """Return what tells one codec from another: its name, of one of your own with a digest of its file."""
    code = code_digest(make_codec(name)) if ":" in name else ""
    return f"{name} {code}" if code else name


def _own_codec(name: str) -> Codec:
    try:
        codec = load_own("codec", name, name)
    except TaskError as error:
        raise ConfigError(f"policy.codec: {error}") from error
    if not isinstance(codec, Codec):
        raise ConfigError(f"policy.codec: {name} is no Codec; it needs {', '.join(CODEC_PARTS)}")
    return codec


def point_codec(name: str) -> PointCodec:
    """Return the codec called `name`. Raises ConfigError where it does not tell its points."""
    codec = make_codec(name)
    if not isinstance(codec, PointCodec):
        raise ConfigError(lacks_points(name))
    return codec


def lacks_points(name: str) -> str:
    """Return what to do with a codec that does not tell its points, as one line."""
    return (
        f'policy.codec: {name} lacks {" and ".join(POINT_PARTS)}, which policy.pointing = "pointer" needs; '
        'add them (docs/policy.md), or set policy.pointing = "text"'
    )
