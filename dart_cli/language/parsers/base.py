"""Model text <-> GUI actions; one action parser per action language.

    ActionParser          what every language offers: parse, format, as_history
    PointParser     one that also tells where a text names a place: what `policy.pointing = "pointer"` needs
    WrittenPoint   a place in a text
    summary_of     what a completion says of its action, in words

The languages are in `action_parsers/`: `compact` (the tiny model), `uitars` (UI-TARS text), tool calls, calls of
pyautogui, and GLM's (docs/families.md); one of your own is named as file.py:MyParser (docs/policy.md).
Texts are parsed by a grammar, by json or by ast, never evaluated; a text that is no action raises ActionError and
nothing else. Torch-free: environment processes import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dart_cli.language.coordinates import CoordinateMap
from envs.contract.actions import Action


@runtime_checkable
class ActionParser(Protocol):
    """One action language.

    `limits` has, by the kind of an action (envs.contract.actions), what the language lacks of it and how it is
    expressed instead. Actions of all other kinds can be expressed, each with any of its fields.
    """

    @property
    def limits(self) -> Mapping[str, str]:
        """Kinds of actions that the language cannot express in full; see the class."""
        ...

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action a completion means, in pixels of the screenshot.

        Raises ActionError, which names what is wrong and where in the text.
        """
        ...

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return the text that `parse` reads as `action`, as the model would write it.

        Exact up to the grid of `coordinates` (see coordinates.py). Raises ActionError for an action that the
        language cannot express: a form of it named in `limits`, or a key by a name that is not ours.
        """
        ...

    def as_history(self, text: str) -> str:
        """Return a past completion as the model expects to see it in a prompt."""
        ...


@dataclass(frozen=True)
class WrittenPoint:
    """Characters [start, end) of a text name the point (x, y), in the model's numbers."""

    start: int
    end: int
    x: int
    y: int


@runtime_checkable
class PointParser(ActionParser, Protocol):
    """A language whose points can be replaced: by the pointers of a model that points at patches.

    Its model writes a pointer in the place of what `write_point` gives.
    """

    def write_point(self, x: int, y: int) -> str:
        """Return the model's numbers as a point in a text."""
        ...

    def find_points(self, text: str) -> Sequence[WrittenPoint]:
        """Return the points that `parse` reads in a completion, in their order; none in a text that is no action.

        In the place of each, what `write_point` gives of its numbers leaves the action as it is. Raises nothing.
        """
        ...


def summary_of(action_parser: ActionParser, text: str) -> str:
    """Return what a completion says of its action, as its family's later prompts tell it; the text itself without one.

    An action parser has a `summary` for it where its family's prompts have such lines.
    """
    summary = getattr(action_parser, "summary", None)
    return str(summary(text)) if callable(summary) else " ".join(text.split())
