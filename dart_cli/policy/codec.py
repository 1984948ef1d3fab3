"""Model text <-> GUI actions; one codec per action language.

    Codec          what every language offers: parse, format, as_history
    PointCodec     one that also tells where a text names a place: what `policy.pointing = "pointer"` needs
    WrittenPoint   a place in a text
    summary_of     what a completion says of its action, in words
    make_codec     the codec of a configured name (`policy.codec`)
    point_codec    the same, where it is a PointCodec

The languages are in `codecs/`: `compact` (the tiny model), `uitars` (UI-TARS text), tool calls, calls of
pyautogui, and GLM's (docs/families.md); one of your own is named as file.py:MyCodec (docs/policy.md).
Texts are parsed by a grammar, by json or by ast, never evaluated; a text that is no action raises ActionError and
nothing else. Torch-free: environment processes import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol, cast, runtime_checkable

from bus.errors import ConfigError, TaskError
from dart_cli.config.schema import CODEC_PARTS, CODECS, POINT_PARTS
from dart_cli.policy.coordinates import CoordinateMap
from envs.actions import Action
from envs.own_code import load_own


@runtime_checkable
class Codec(Protocol):
    """One action language.

    `limits` has, by the kind of an action (envs.actions), what the language lacks of it and how it is
    expressed instead. Actions of all other kinds can be expressed, each with any of its fields.
    """

    @property
    def limits(self) -> Mapping[str, str]:
        """Kinds of actions that the language cannot express in full; see the class."""
        ...

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """The action a completion means, in pixels of the screenshot.

        Raises ActionError, which names what is wrong and where in the text.
        """
        ...

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """The text that `parse` reads as `action`, as the model would write it.

        Exact up to the grid of `coordinates` (see coordinates.py). Raises ActionError for an action that the
        language cannot express: a form of it named in `limits`, or a key by a name that is not ours.
        """
        ...

    def as_history(self, text: str) -> str:
        """A past completion as the model expects to see it in a prompt."""
        ...


@dataclass(frozen=True)
class WrittenPoint:
    """Characters [start, end) of a text name the point (x, y), in the model's numbers."""

    start: int
    end: int
    x: int
    y: int


@runtime_checkable
class PointCodec(Codec, Protocol):
    """A language whose points can be replaced: by the pointers of a model that points at patches.

    Its model writes a pointer in the place of what `write_point` gives.
    """

    def write_point(self, x: int, y: int) -> str:
        """The model's numbers as a point in a text."""
        ...

    def find_points(self, text: str) -> Sequence[WrittenPoint]:
        """The points that `parse` reads in a completion, in their order; none in a text that is no action.

        In the place of each, what `write_point` gives of its numbers leaves the action as it is. Raises nothing.
        """
        ...


def summary_of(codec: Codec, text: str) -> str:
    """What a completion says of its action, as its family's later prompts tell it; the text itself without one.

    A codec has a `summary` for it where its family's prompts have such lines.
    """
    summary = getattr(codec, "summary", None)
    return str(summary(text)) if callable(summary) else " ".join(text.split())


_MODULES = {
    **dict.fromkeys(("toolcall", "toolcall-mobile", "toolcall-mai", "toolcall-xml"), "toolcall"),
    **dict.fromkeys(("pyautogui", "scalecua"), "pyautogui"),
    "glm": "glm",
}
"""The modules of codecs/ whose CODECS have several names, or came with a family of models."""


@cache
def make_codec(name: str) -> Codec:
    """The codec called `name`; built once. Raises ConfigError for an unknown name."""
    if name == "compact":
        from dart_cli.policy.codecs.compact import CompactCodec

        return CompactCodec()
    if name == "uitars":
        from dart_cli.policy.codecs.uitars import UitarsCodec

        return UitarsCodec()
    if name in _MODULES:
        module = import_module(f"dart_cli.policy.codecs.{_MODULES[name]}")
        return cast("Codec", module.CODECS[name]())
    if ":" in name:
        return _own_codec(name)
    raise ConfigError(
        f"policy.codec must be {', '.join(CODECS)}, or your own as file.py:MyCodec, got {name}"
    )


def _own_codec(name: str) -> Codec:
    try:
        codec = load_own("codec", name, name)
    except TaskError as error:
        raise ConfigError(f"policy.codec: {error}") from error
    if not isinstance(codec, Codec):
        raise ConfigError(f"policy.codec: {name} is no Codec; it needs {', '.join(CODEC_PARTS)}")
    return codec


def point_codec(name: str) -> PointCodec:
    """The codec called `name`. Raises ConfigError where it does not tell its points."""
    codec = make_codec(name)
    if not isinstance(codec, PointCodec):
        raise ConfigError(lacks_points(name))
    return codec


def lacks_points(name: str) -> str:
    """What to do with a codec that does not tell its points, as one line."""
    return (
        f'policy.codec: {name} lacks {" and ".join(POINT_PARTS)}, which policy.pointing = "pointer" needs; '
        'add them (docs/policy.md), or set policy.pointing = "text"'
    )
