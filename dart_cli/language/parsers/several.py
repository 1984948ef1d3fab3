"""Completions of several actions (`policy.max_actions` > 1).

    SeveralActions   an action parser for completions of 1 to `most` actions
    SeveralPoints    the same for a language with points
    several          returns the one of the two that fits a language
    read_actions     returns the actions of a completion, with any action parser
    write_actions    returns the completion of some actions, with any action parser

A completion is read as a whole before its first action is performed. If one of its parts is no action, or if
it has more parts than `most`, all of it is malformed. A call that acts where the pointer is acts where the
actions before it in the same completion leave the pointer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from bus.errors import ActionError
from dart_cli.language.coordinates import AS_IT_IS, CoordinateMap, pointer_after
from dart_cli.language.parsers.base import (
    ActionParser,
    Part,
    PointParser,
    SplitParser,
    WrittenPoint,
    summary_of,
)
from envs.contract.actions import Action


class SeveralActions:
    """An action parser for completions of 1 to `most` actions, in a language that has such completions."""

    def __init__(self, language: SplitParser, most: int) -> None:
        self._language = language
        self._most = most

    @property
    def limits(self) -> Mapping[str, str]:
        """See ActionParser."""
        return self._language.limits

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of a completion that has one. Raises ActionError, also for several actions."""
        actions = self.parse_all(text, coordinates)
        if len(actions) > 1:
            raise ActionError(f"the completion has {len(actions)} actions")
        return actions[0]

    def parse_all(self, text: str, coordinates: CoordinateMap) -> list[Action]:
        """Return the actions of a completion [N], in order. Raises ActionError if a part of it is none."""
        return self._read([part.text for part in self._parts(text)], coordinates)

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return the completion of one action; see ActionParser."""
        return self.format_all([action], coordinates, thought)

    def format_all(
        self, actions: Sequence[Action], coordinates: CoordinateMap, thought: str = ""
    ) -> str:
        """Return a completion that `parse_all` reads as these actions [N].

        Raises ActionError if there are more than `most`, or if the language cannot write them in one
        completion, e.g. a text that looks like the next action.
        """
        self._refuse_too_many(len(actions))
        texts: list[str] = []
        at = coordinates
        for action in actions:
            texts.append(self._language.format(action, at, "" if texts else thought))
            at = replace(at, pointer=pointer_after(action, at.pointer))
        text = texts[0] if len(texts) == 1 else self._language.join(texts)
        parts = [part.text for part in self._parts(text)]
        if len(parts) != len(texts) or self._read(parts, AS_IT_IS) != self._read(texts, AS_IT_IS):
            raise ActionError("in a completion of several actions its text means other actions")
        return text

    def as_history(self, text: str) -> str:
        """Return a past completion in the form in which the model expects it in a prompt."""
        history = self._language.as_history(text)
        if history != text:
            return history
        for part in reversed(self._parts_or_none(text)):
            history = self._language.as_history(part.text)
            tail = len(part.text) - part.lead - (part.end - part.start)
            inner = history[part.lead : len(history) - tail]
            text = text[: part.start] + inner + text[part.end :]
        return text

    def summary(self, text: str) -> str:
        """Return the description of the whole completion, or else those of its actions; see `summary_of`."""
        return summary_of(self._language, text) or "; ".join(
            summary_of(self._language, part.text) for part in self._parts_or_none(text)
        )

    def _parts(self, text: str) -> Sequence[Part]:
        """Return the parts of a completion. Raises ActionError if there are none, or too many."""
        parts = self._language.split(text)
        self._refuse_too_many(len(parts))
        return parts

    def _parts_or_none(self, text: str) -> Sequence[Part]:
        """Return the parts of a completion; [] for one that is malformed."""
        try:
            return self._parts(text)
        except ActionError:
            return []

    def _refuse_too_many(self, actions: int) -> None:
        if actions > self._most:
            raise ActionError(f"{actions} actions, but policy.max_actions = {self._most}")

    def _read(self, texts: Sequence[str], coordinates: CoordinateMap) -> list[Action]:
        """Return the actions of parts [N], each read with the pointer where those before it leave it."""
        actions: list[Action] = []
        for number, text in enumerate(texts, start=1):
            try:
                action = self._language.parse(text, coordinates)
            except ActionError as error:
                where = f"action {number} of {len(texts)}: " if len(texts) > 1 else ""
                raise ActionError(f"{where}{error}") from None
            actions.append(action)
            coordinates = replace(coordinates, pointer=pointer_after(action, coordinates.pointer))
        return actions


class _SplitPointParser(SplitParser, PointParser, Protocol):
    """A language with points, and with completions of several actions."""


class SeveralPoints(SeveralActions):
    """The PointParser of completions of several actions; all points are places of the same screenshot."""

    def __init__(self, language: _SplitPointParser, most: int) -> None:
        super().__init__(language, most)
        self._pointed = language

    def write_point(self, x: int, y: int) -> str:
        """Return the model's numbers (x, y) as the text of a point."""
        return self._pointed.write_point(x, y)

    def find_points(self, text: str) -> list[WrittenPoint]:
        """Return the points of all actions of a completion, in order; see PointParser."""
        try:
            self.parse_all(text, AS_IT_IS)
        except ActionError:
            return []
        points = []
        for part in self._parts(text):
            moved = part.start - part.lead
            points += [
                replace(point, start=point.start + moved, end=point.end + moved)
                for point in self._pointed.find_points(part.text)
            ]
        return points


def several(language: SplitParser, most: int) -> SeveralActions:
    """Return an action parser for completions of 1 to `most` actions of a language."""
    if isinstance(language, PointParser):
        return SeveralPoints(language, most)
    return SeveralActions(language, most)


def read_actions(
    action_parser: ActionParser, text: str, coordinates: CoordinateMap
) -> list[Action]:
    """Return the actions of a completion [N], N >= 1. Raises ActionError if it is malformed."""
    if isinstance(action_parser, SeveralActions):
        return action_parser.parse_all(text, coordinates)
    return [action_parser.parse(text, coordinates)]


def write_actions(
    action_parser: ActionParser,
    actions: Sequence[Action],
    coordinates: CoordinateMap,
    thought: str = "",
) -> str:
    """Return the completion of actions [N], N >= 1. Raises ActionError if the language cannot write it."""
    if isinstance(action_parser, SeveralActions):
        return action_parser.format_all(actions, coordinates, thought)
    if len(actions) > 1:
        raise ActionError(f"{len(actions)} actions, but policy.max_actions = 1")
    return action_parser.format(actions[0], coordinates, thought)
