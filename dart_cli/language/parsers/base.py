"""The interface of an action parser, which turns the text of a model into a GUI action and back.

    ActionParser   parses, formats and shows in a history the texts of one action language
    PointParser    an action parser that also finds the points in a text, for a policy that points
    WrittenPoint   a point in a text: its characters and its numbers
    SplitParser    an action parser whose language has completions of several actions
    Part           one action of such a completion, as a completion of its own
    whole          returns a completion as one part
    summary_of     returns a completion's own description of its action, in words

The modules beside this one have the languages: `compact` (the tiny model), `uitars` (UI-TARS text), tool
calls, calls of pyautogui, and the language of GLM (docs/families.md). In several.py are completions of
several actions. A user's own action parser is named as
file.py:MyParser (docs/policy.md).

Texts are parsed by a grammar, by json or by ast, and are never evaluated. A text that is no action raises
ActionError and no other error. Environment processes import this package, so it does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dart_cli.language.coordinates import CoordinateMap
from envs.contract.actions import Action


@runtime_checkable
class ActionParser(Protocol):
    """Reads and writes the texts of one action language.

    `limits` says, for a kind of action (envs.contract.actions), which forms of it the language cannot
    express, and how they are expressed instead. Actions of all other kinds can be expressed, with any values
    of their fields.
    """

    @property
    def limits(self) -> Mapping[str, str]:
        """The kinds of actions that the language cannot express in full, with a text on each.

        See the class.
        """
        ...

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action that a completion means, in pixels of the screenshot.

        Raises ActionError, which names the mistake and its place in the text.
        """
        ...

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return a text, as the model would write it, that `parse` reads as `action`.

        Pixels are exact up to the grid of `coordinates` (see coordinates.py). Raises ActionError for an
        action that the language cannot express: a form that `limits` names, or a key whose name is not one of
        ours.
        """
        ...

    def as_history(self, text: str) -> str:
        """Return a past completion in the form in which the model expects it in a prompt."""
        ...


@dataclass(frozen=True)
class WrittenPoint:
    """A point in a text: the characters [start, end) name (x, y), in the model's numbers."""

    start: int
    end: int
    x: int
    y: int


@runtime_checkable
class PointParser(ActionParser, Protocol):
    """An action parser that can find and write the points of a text.

    If the model points, it writes a pointer wherever the language would have the text of `write_point`.
    """

    def write_point(self, x: int, y: int) -> str:
        """Return the model's numbers (x, y) as the text of a point."""
        ...

    def find_points(self, text: str) -> Sequence[WrittenPoint]:
        """Return the points that `parse` reads in a completion, in order; none if the text is no action.

        If each point is replaced by `write_point` of its numbers, `parse` reads the same action. Never
        raises.
        """
        ...


@dataclass(frozen=True)
class Part:
    """One action of a completion, as a completion of its own.

    The characters [start, end) of the completion are those of `text` from `lead` on. What is before and after
    them in `text` is what the language needs around an action, such as tags.
    """

    text: str
    start: int
    end: int
    lead: int = 0


@runtime_checkable
class SplitParser(ActionParser, Protocol):
    """An action parser whose language has completions of several actions (`policy.max_actions`).

    several.py reads and writes such completions with these two methods, and with the methods for one action.
    """

    def split(self, text: str) -> Sequence[Part]:
        """Return the actions of a completion, in order; for a completion of one action, one part with all of it.

        The parts are not read: `parse` may raise an error for any of them. Raises ActionError for a text that
        has no parts.
        """
        ...

    def join(self, texts: Sequence[str]) -> str:
        """Return one completion with the actions of these completions [N], N > 1, in order.

        `format` has written the texts, and only the first has a thought.
        """
        ...


def whole(text: str) -> list[Part]:
    """Return a completion as one part."""
    return [Part(text, 0, len(text))]


def summary_of(action_parser: ActionParser, text: str) -> str:
    """Return a completion's description of its action, which later prompts show for this step.

    An action parser has a method `summary` if the prompts of its family have such lines. Without the method
    the result is the whole text, on one line.
    """
    summary = getattr(action_parser, "summary", None)
    return str(summary(text)) if callable(summary) else " ".join(text.split())
