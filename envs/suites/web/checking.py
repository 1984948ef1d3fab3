"""What a check reads, what it wants, and the verdict of all checks of a task.

    Instance        a task with the values of its seed: what an episode is about
    Scene           what sources read from: server, page, the policy's answer
    WebEpisode      the part of a scene that the user's own functions get
    verdict_of      the verdict of a task's checks on a scene
    evaluate_check  one check: the part of it that holds, and why

A source that fails (no answer, an error of the server, a script that throws) raises EnvError: the episode is
invalid then, and never a failure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin

from bus.error_texts import one_line
from bus.errors import DartError, EnvError
from envs.contract.base import Verdict
from envs.contract.own_code import load_own
from envs.suites.web.file import WebFile, check_placeholders
from envs.suites.web.schema import Check, Source, WebTask
from envs.tools.app_server import HttpAnswer, ask
from envs.tools.draws import draw, fill
from envs.tools.json_paths import (
    JsonPath,
    NothingThereError,
    as_text,
    first_difference,
    same,
    without,
)

_LONGEST = 100  # characters of a value in a reason


@dataclass(frozen=True)
class Instance:
    """A task with the values of its seed."""

    task: WebTask
    values: Mapping[str, Any]
    """What the task draws, and `session`, `port`, `folder` and `seed`."""

    def text(self, template: str) -> str:
        """Return a text with its names in braces filled in."""
        return str(fill(template, self.values))

    def value(self, template: Any) -> Any:
        """Return a JSON value with its names in braces filled in; a text that is one name is its value."""
        return fill(template, self.values)

    def address(self, template: str) -> str:
        """Return an address with its names in braces filled in, which are escaped."""
        return self.escaped(template, lambda text: quote(text, safe=""))

    def escaped(self, template: str, escape: Callable[[str], str]) -> str:
        """Return a text with its names in braces filled in, each value through `escape`."""

        def each(value: Any) -> Any:
            return (
                list(map(each, value))
                if isinstance(value, list | tuple)
                else escape(as_text(value))
            )

        return str(fill(template, {name: each(value) for name, value in self.values.items()}))

    def path(self, template: str) -> JsonPath:
        """Return a path with its names in braces filled in."""
        return JsonPath.of(template).filled(self.text)


def make_instance(file: WebFile, task: WebTask, seed: int, names: Mapping[str, Any]) -> Instance:
    """Return a task with the values that its seed draws. Raises TaskError and EnvError."""
    if isinstance(task.draw, str):
        values = call_own(file, task.draw, seed)
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise EnvError(
                f"{task.id}: {task.draw} must return a dict of values by name, got {values!r:.80}"
            )
        try:
            check_placeholders(task, values)
        except ValueError as error:
            raise EnvError(f"{task.draw}: {error}") from None
    else:
        values = draw(task.draw, task.id, seed)
    return Instance(task, {**values, **names, "seed": seed})


@dataclass
class WebEpisode:
    """What the user's own functions get: `function(episode)`.

    A function of a check returns a bool, a number from 0 to 1, or a pair of it and a reason; with `equals` or
    the like beside it, it returns the value that is compared. A function of a set-up returns nothing.
    """

    values: Mapping[str, Any]
    """What the task draws, and `session`, `port`, `folder` and `seed`."""
    address: str
    """The address with which the episode began."""
    downloads: Path
    """The folder of the files that the page has downloaded."""
    answer: str | None = None
    """The policy's answer; None if it gave none."""
    deadline_s: float = 20.0

    def ask(self, method: str, address: str, json: Any = None) -> HttpAnswer:
        """Send a request to the application and return its `status`, `body`, `text` and `value()`."""
        whole = urljoin(self.address, address)
        return ask(method.upper(), whole, body=json, deadline_s=self.deadline_s)


@dataclass
class Scene:
    """What sources read from."""

    file: WebFile
    instance: Instance
    episode: WebEpisode
    evaluate: Callable[[str], Any]
    """Returns the value of a JavaScript expression in the page."""
    deadline_s: float
    before: Any = None  # the state when the episode began
    _state: list[Any] = field(default_factory=list)

    def renewed(self) -> Scene:
        """Return the scene as it is now, with nothing read yet."""
        return replace(self, _state=[])

    def read(self, source: Source) -> Any:
        """Return the value of a source, without its path. Raises EnvError if it fails."""
        if source.method:
            return self._send(source).value()
        if source.script is not None:
            return self._scripted(source.script)
        if source.python is not None:
            return call_own(self.file, source.python, self.episode)
        if source.read == "answer":
            return None if self.episode.answer is None else self.episode.answer.strip()
        if source.read == "address":
            return self.evaluate("location.href")
        return self.state()

    def status(self, source: Source) -> int:
        """Return the status of the answer to a request."""
        return self._send(source, any_status=True).status

    def state(self) -> Any:
        """Return the application's state, read once for each scene."""
        if not self._state:
            assert self.file.application.state is not None, "the file was checked"
            value, state = self.read(self.file.application.state), self.file.application.state
            if state.path is not None:
                value = _part_of(value, self.instance.path(state.path), f"state: {_name(state)}")
            self._state.append(value)
        return self._state[0]

    def _send(self, source: Source, *, any_status: bool = False) -> HttpAnswer:
        method = source.method
        address = urljoin(self.episode.address, self.instance.address(getattr(source, method)))
        body = self.instance.value(self.file.with_contents(source.json_))
        headers = {name: self.instance.text(text) for name, text in source.headers.items()}
        answer = ask(
            method.upper(), address, body=body, headers=headers, deadline_s=self.deadline_s
        )
        if answer.status >= 400 and not any_status:
            text = " ".join(answer.text.split())[:_LONGEST]
            raise EnvError(
                f"{method.upper()} {address}: status {answer.status}{text and f': {text}'}"
            )
        return answer

    def _scripted(self, script: str) -> Any:
        code = self.file.contents[script] if script.startswith("@") else script
        # A policy that leaves the application has failed; a script that throws in it breaks the episode.
        if self.evaluate("location.protocol") not in ("http:", "https:"):
            raise PageLeftError
        values = json.dumps(dict(self.instance.values), default=str)
        try:
            return self.evaluate(f"(async (values) => (\n{code.strip().rstrip(';')}\n))({values})")
        except EnvError as error:
            raise EnvError(f"script {' '.join(script.split())[:60]!r}: {error}") from error


class PageLeftError(EnvError):
    """The page that is shown is none of the application's, so that no script can judge it."""

    def __init__(self) -> None:
        super().__init__("the application was left")


class Score(NamedTuple):
    """How much of a check holds, from 0 to 1, and why."""

    value: float
    reason: str


def verdict_of(scene: Scene) -> Verdict:
    """Return the verdict of a task's checks. Raises EnvError if one of them cannot be evaluated."""
    task = scene.instance.task
    try:
        score = _all(task.check, scene)
        change = _changed(scene) if task.unchanged else ""
    except PageLeftError as error:
        return Verdict("fail", str(error))
    if change:
        return Verdict("fail", f"changed beside the task: {change}", 0.0)
    return Verdict.scored(score.value, score.reason)


def evaluate_check(check: Check, scene: Scene) -> Score:
    """Return how much of a check holds. Raises EnvError if it cannot be evaluated."""
    if check.all is not None:
        return _all(check.all, scene)
    if check.any is not None:
        scores = [_evaluated(inner, scene) for inner in check.any]
        best = max(scores, key=lambda score: score.value)
        reasons = best.reason if best.value > 0 else "; ".join(score.reason for score in scores)
        return Score(best.value, reasons)
    if check.status is not None:
        status = scene.status(check)
        return _judged(
            status == check.status, f"{_name(check)} has status {status}, want {check.status}"
        )
    value = scene.read(check)
    if not check.wants and check.path is None:
        return _own_score(check, value)
    return _compared(check, value, scene)


def _evaluated(check: Check, scene: Scene) -> Score:
    """Return how much of a check holds; nothing of it if it asks a page that was left."""
    try:
        return evaluate_check(check, scene)
    except PageLeftError as error:
        return Score(0.0, str(error))


def _all(checks: Sequence[Check], scene: Scene) -> Score:
    """Join checks that must all hold: by their weights if one has a weight, else 1 or 0."""
    scores = [evaluate_check(check, scene) for check in checks]
    wrong = [score.reason for score in scores if score.value < 1]
    if not wrong:
        return Score(1.0, "; ".join(score.reason for score in scores))
    weights = [check.weight or 1.0 for check in checks]
    if len(checks) == 1:
        part = scores[0].value
    elif all(check.weight is None for check in checks):
        part = 0.0
    else:
        part = sum(weight * score.value for weight, score in zip(weights, scores, strict=True))
        part /= sum(weights)
    # Rounding must not make a pass of what lacks a part.
    return Score(min(part, math.nextafter(1.0, 0.0)), "; ".join(wrong))


def _compared(check: Check, value: Any, scene: Scene) -> Score:
    """Return whether a value is what a check wants."""
    name, instance = _name(check), scene.instance
    if check.path is not None:
        path = instance.path(check.path)
        name = f"{name} {path.text}".strip()
        try:
            value = path.value(value)
        except NothingThereError as error:
            return _judged(check.exists is False, f"{name}: {error}")
    for want in check.wants:
        right, text = _CONDITIONS[want](value, instance.value(getattr(check, want)))
        if not right:
            return Score(0.0, f"{name} is {_short(value)}, want {text}")
    if not check.wants:
        return _judged(bool(value), f"{name} is {_short(value)}")
    return Score(1.0, f"{name} is {_short(value)}")


def _equals(value: Any, want: Any) -> bool:
    """Return whether a value is what is wanted; a text may be wanted as a number and the other way round."""
    if isinstance(value, str) != isinstance(want, str) and not isinstance(value, bool | None):
        return isinstance(value, str | int | float) and as_text(value) == as_text(want)
    return same(value, want)


def _contains(value: Any, want: Any) -> bool:
    if isinstance(value, str):
        return as_text(want) in value
    if isinstance(value, list):
        return any(same(entry, want) for entry in value)
    return isinstance(value, dict) and want in value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_CONDITIONS: Mapping[str, Callable[[Any, Any], tuple[bool, str]]] = {
    "equals": lambda value, want: (_equals(value, want), _short(want)),
    "contains": lambda value, want: (_contains(value, want), f"{_short(want)} in it"),
    "lacks": lambda value, want: (not _contains(value, want), f"no {_short(want)} in it"),
    "matches": lambda value, want: (
        value is not None and re.search(want, as_text(value)) is not None,
        f"what matches {want!r}",
    ),
    "at_least": lambda value, want: (_is_number(value) and value >= want, f"at least {want:g}"),
    "at_most": lambda value, want: (_is_number(value) and value <= want, f"at most {want:g}"),
    "length": lambda value, want: (
        isinstance(value, str | list | dict) and len(value) == want,
        f"a length of {want}",
    ),
    "exists": lambda value, want: (
        (value is not None) == want,
        "a value" if want else "nothing there",
    ),
}
"""Name of a condition -> a function of the value and of what is wanted: whether it holds, and the want."""


def _own_score(check: Check, value: Any) -> Score:
    """Return the score that a script or a function gave: a bool, a number, or a pair with a reason."""
    name = _name(check)
    part, reason = (
        (value[0], str(value[1])) if _is_pair(value) else (value, f"{name} is {_short(value)}")
    )
    if isinstance(part, bool):
        return Score(float(part), reason)
    if _is_number(part) and 0 <= part <= 1:
        return Score(float(part), reason)
    raise EnvError(
        f"{name} must give true, false or a number from 0 to 1, got {_short(value)}; "
        "or add equals or another condition"
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], str)


def _judged(right: bool, reason: str) -> Score:
    return Score(float(right), reason)


def _changed(scene: Scene) -> str:
    """Return what changed in the parts of the state that must not; empty if nothing did."""
    instance = scene.instance
    texts = instance.task.unchanged
    exceptions = [instance.path(text[1:]) for text in texts if text.startswith("!")]
    pruned = [without(state, exceptions) for state in (scene.before, scene.state())]
    for text in texts:
        if text.startswith("!"):
            continue
        path = instance.path(text)
        before, after = (_or_nothing(path, state) for state in pruned)
        if change := first_difference(before, after, "" if path.text == "." else path.text):
            return change
    return ""


def _or_nothing(path: JsonPath, state: Any) -> Any:
    try:
        return path.value(state)
    except NothingThereError:
        return None


def _part_of(value: Any, path: JsonPath, what: str) -> Any:
    try:
        return path.value(value)
    except NothingThereError as error:
        raise EnvError(f"{what}: {error}") from None


def call_own(file: WebFile, name: str, argument: Any) -> Any:
    """Call a function of the user's and return its result; a file's path begins in the folder of the tasks.

    Raises TaskError if there is no such function, EnvError if it raises.
    """
    module, _, attribute = name.rpartition(":")
    where = str(file.folder / module) if module.endswith(".py") else module
    function = load_own("function", name, f"{where}:{attribute}", once=True, instantiate=False)
    try:
        return function(argument)  # type: ignore[operator]  # whatever it is: its error names it
    except DartError:
        raise
    except Exception as error:
        raise EnvError(f"{name}: {one_line(error)}") from error


def _name(source: Source) -> str:
    """Return a source in words; empty for the state."""
    if source.method:
        return f"{source.method.upper()} {getattr(source, source.method)}"
    if source.script is not None:
        return f"script {' '.join(source.script.split())[:60]!r}"
    if source.python is not None:
        return source.python
    return {"answer": "the answer", "address": "the address"}.get(source.read or "", "")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
