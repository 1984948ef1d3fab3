"""FILE.toml of suite `web`: the application, and its tasks; see docs/environments/web.md.

read_file    the file, read and checked; every mistake is one TaskError with its place and the fix
WebFile      the application: its address, the command that starts it, the size of its page
WebTask      a task: instruction, set-up, checks, solution
Source       where a value comes from: a request, a script in the page, a function of the user's
SetupStep    a source whose value does not matter
Check        a source and what its value must be; or checks joined by all or any
Move         one entry of a solution
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from bus.error_texts import did_you_mean
from bus.errors import ActionError
from envs.contract.actions import action_from_dict, action_to_dict
from envs.contract.base import Split
from envs.contract.options import Size
from envs.tools.draws import KINDS
from envs.tools.json_paths import JsonPath

METHODS = ("get", "post", "put", "patch", "delete")
WANTS = (
    "equals",
    "contains",
    "lacks",
    "matches",
    "at_least",
    "at_most",
    "length",
    "exists",
    "status",
)
GIVEN = ("session", "port", "folder", "seed")
"""Names that every text may have in braces, beside what the task draws."""

MOST_TASKS = 100_000
_Text = Annotated[str, Field(pattern=r"\S")]
_Steps = Annotated[int, Field(ge=1, le=10_000, strict=True)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Table):
    """Where a value comes from; exactly one of the fields up to `read` is set."""

    get: _Text | None = None
    post: _Text | None = None
    put: _Text | None = None
    patch: _Text | None = None
    delete: _Text | None = None
    script: _Text | None = None
    """A JavaScript expression, evaluated in the page; it may use `values` and `await`."""
    python: _Text | None = None
    """A function, `package.module:name` or `file.py:name`."""
    read: Literal["state", "answer", "address"] | None = None
    """What is at hand: the file's `state`, the policy's answer, the address of the page."""
    json_: Any = Field(
        default=None, alias="json"
    )  # the body of a request; "@FILE" is a file's content
    headers: Mapping[str, str] = Field(default_factory=dict)
    path: str | None = None  # what of the value, see envs/tools/json_paths.py

    @property
    def method(self) -> str:
        """The HTTP method in lower case; empty if the source is no request."""
        return next((name for name in METHODS if getattr(self, name) is not None), "")

    @property
    def kind(self) -> str:
        """The name of the field that is set; empty if none is."""
        return next(iter(self._kinds()), "")

    @field_validator("path")
    @classmethod
    def _is_path(cls, text: str | None) -> str | None:
        if text is not None:
            JsonPath.of(text)
        return text

    @model_validator(mode="after")
    def _has_one_kind(self) -> Self:
        kinds = self._kinds()
        if len(kinds) > 1:
            raise ValueError(f"has {' and '.join(kinds)}; split it into one entry for each")
        if not self.method and (self.json_ is not None or self.headers):
            raise ValueError(
                'json and headers belong to a request: add post = "/address" or the like'
            )
        if self.python is not None and ":" not in self.python:
            raise ValueError(f"python must be module:name or file.py:name, got {self.python!r}")
        return self

    def _kinds(self) -> list[str]:
        kinds = (*METHODS, "script", "python", "read")
        return [name for name in kinds if getattr(self, name) is not None]


class StateSource(Source):
    """The source of the application's state."""

    @model_validator(mode="after")
    def _is_source(self) -> Self:
        if self.kind in ("", "read"):
            raise ValueError("needs one of get, post, script or python")
        return self


class SetupStep(Source):
    """One step before an episode begins."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.kind in ("", "read"):
            raise ValueError(f"needs one of {', '.join(METHODS)}, script, python")
        if self.path is not None:
            raise ValueError("path is for checks")
        return self


class Check(Source):
    """One condition, or several that are joined by `all` or `any`."""

    equals: Any = None
    contains: Any = None
    lacks: Any = None
    matches: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    length: Annotated[int, Field(ge=0, strict=True)] | None = None
    exists: bool | None = None
    status: Annotated[int, Field(ge=100, le=599, strict=True)] | None = None
    all: list[Check] | None = Field(default=None, min_length=1)
    any: list[Check] | None = Field(default=None, min_length=1)
    weight: Annotated[float, Field(gt=0)] | None = None

    @property
    def wants(self) -> list[str]:
        """The names of the conditions that are set."""
        return [name for name in WANTS if name in self.model_fields_set]

    @property
    def joined(self) -> list[Check]:
        """The checks that it joins; none for a condition."""
        return self.all or self.any or []

    @field_validator("matches")
    @classmethod
    def _is_pattern(cls, text: str | None) -> str | None:
        try:
            re.compile(text or "")
        except re.error as error:
            raise ValueError(f"{text!r} is no regular expression: {error}") from None
        return text

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.all is not None and self.any is not None:
            raise ValueError("has all and any; put one into the other")
        if self.joined:
            if self.kind or self.wants or self.path is not None:
                raise ValueError("joins checks, and cannot have a condition beside them")
            return self
        if not self.wants and self.kind not in ("script", "python"):
            raise ValueError(f"says nothing of its value; add one of {', '.join(WANTS)}")
        if self.status is not None and (not self.method or len(self.wants) > 1 or self.path):
            raise ValueError("status stands alone beside a request")
        if not self.kind and self.path is None:
            raise ValueError(
                f"has nothing to check: add path (of the file's state), {', '.join(METHODS)}, script, python or read"
            )
        return self


class Move(_Table):
    """One entry of a solution; exactly one of its fields but the last three is set."""

    click: _Text | None = None  # a CSS selector, as of the next five
    double_click: _Text | None = None
    triple_click: _Text | None = None
    right_click: _Text | None = None
    hover: _Text | None = None
    drag: _Text | None = None
    choose: _Text | None = None  # the option `text` of a drop-down list
    type: str | None = None
    keys: Annotated[list[_Text], Field(min_length=1)] | _Text | None = None  # "ctrl+a"
    goto: _Text | None = None
    answer: str | None = None
    wait: Annotated[float, Field(ge=0, le=60)] | None = None
    action: dict[str, Any] | None = None
    """An action in pixels of the screenshot, as in docs/environments/index.md, with its `kind`."""
    text: str | None = None  # of the elements that match, the one with this text or label
    nth: Annotated[int, Field(ge=0, strict=True)] = 0
    to: _Text | None = None  # where a drag ends, a CSS selector

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return self._kinds()[0]

    @property
    def selector(self) -> str:
        """The selector of the element to act on; empty if there is none."""
        return getattr(self, self.kind) if self.kind in ON_ELEMENTS else ""

    @field_validator("action")
    @classmethod
    def _is_action(cls, action: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            return action and action_to_dict(action_from_dict(action))
        except ActionError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        kinds = self._kinds()
        if len(kinds) != 1:
            among = ", ".join(MOVES)
            among_these = f"has {' and '.join(kinds)}" if kinds else "has none"
            raise ValueError(f"must have one of {among}; it {among_these}")
        if (self.to is not None) != (kinds[0] == "drag"):
            raise ValueError("drag and to belong together")
        if kinds[0] == "choose" and self.text is None:
            raise ValueError("choose needs text, the option to choose")
        if self.text is not None and kinds[0] not in ON_ELEMENTS:
            raise ValueError(f"text belongs to one of {', '.join(ON_ELEMENTS)}")
        return self

    def _kinds(self) -> list[str]:
        return [name for name in MOVES if getattr(self, name) is not None]


ON_ELEMENTS = ("click", "double_click", "triple_click", "right_click", "hover", "drag", "choose")
MOVES = (*ON_ELEMENTS, "type", "keys", "goto", "answer", "wait", "action")


class WebTask(_Table):
    """A task on the application."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    instruction: _Text
    draw: dict[str, Any] | _Text = Field(default_factory=dict)
    """Values by name, see envs/tools/draws.py; or a function of the seed that returns them."""
    setup: list[SetupStep] = Field(default_factory=list)
    check: list[Check] = Field(default_factory=list)
    unchanged: list[_Text] = Field(default_factory=list)
    solution: list[Move] = Field(default_factory=list)
    uploads: list[_Text] = Field(default_factory=list)
    max_steps: _Steps | None = None
    split: Split = "train"
    feasible: bool = True
    """False: it cannot be done, and only the action `fail` passes it."""

    @field_validator("id")
    @classmethod
    def _is_printable(cls, text: str) -> str:
        if not text.isprintable() or not text.strip():
            raise ValueError(f"must be printable, got {text!r}")
        return text

    @field_validator("unchanged")
    @classmethod
    def _are_paths(cls, paths: list[str]) -> list[str]:
        for path in paths:
            JsonPath.of(path.removeprefix("!"))
        if paths and all(path.startswith("!") for path in paths):
            raise ValueError('names only exceptions; add what they are exceptions of, e.g. "."')
        return paths

    @field_validator("draw")
    @classmethod
    def _are_draws(cls, draw: dict[str, Any] | str) -> dict[str, Any] | str:
        if isinstance(draw, str):
            if ":" not in draw:
                raise ValueError(f"must be a table or a function module:name, got {draw!r}")
            return draw
        for name, entry in draw.items():
            if name in GIVEN:
                raise ValueError(f"{name} is a name that every text has already; choose another")
            if not re.fullmatch(r"[a-z_][a-z0-9_]*", name):
                raise ValueError(f"{name!r} must be a name in lower case, such as card_name")
            if isinstance(entry, list):
                if not entry:
                    raise ValueError(f"{name} is an empty list; name what to choose from")
            elif not (isinstance(entry, dict) and len(entry) == 1 and next(iter(entry)) in KINDS):
                wrong = next(iter(entry)) if isinstance(entry, dict) and entry else ""
                raise ValueError(
                    f"{name} must be a list to choose from, or a table with one of {', '.join(KINDS)}"
                    f"{did_you_mean(wrong, KINDS) if wrong else ''}"
                )
        return draw

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.feasible and not self.check:
            raise ValueError("needs check, a list of conditions; or feasible = false")
        if not self.feasible and self.check:
            raise ValueError("has a check, but cannot be done (feasible = false); leave one out")
        if any(move.kind == "answer" for move in self.solution[:-1]):
            raise ValueError(
                "an answer ends the episode, so it must be the last entry of the solution"
            )
        return self


class Application(_Table):
    """The application and its tasks."""

    url: _Text
    start: list[_Text] = Field(default_factory=list)
    start_s: Annotated[float, Field(gt=0)] = 30.0
    fresh: Annotated[bool, Field(strict=True)] = False
    """Whether the server starts anew for each episode."""
    ready: _Text | None = None
    """A JavaScript expression that is true once the page can be used."""
    size: Size = (1280, 720)
    hosts: list[_Text] = Field(default_factory=list)
    """Further hosts that pages may reach, each "name" or "name:port"."""
    dialogs: Literal["accept", "dismiss"] = "accept"
    clock: datetime | None = None
    """What the page's clock shows when an episode begins; the present time if it is not set."""
    state: StateSource | None = None
    max_steps: _Steps = 30
    ends: Literal["done", "goal"] = "done"
    """When an episode ends before its last step: when the policy says so, or also once the checks hold."""
    tasks: list[WebTask] = Field(min_length=1, max_length=MOST_TASKS)

    @property
    def names(self) -> list[str]:
        """The names of the hosts that pages may reach, without ports."""
        hosts = [host_of(self.url), *self.hosts]
        return [host.partition(":")[0] for host in hosts]

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        if urlsplit(url).scheme not in ("http", "https") or not host_of(url):
            raise ValueError(f"must be an address such as http://127.0.0.1:5173/, got {url!r}")
        if host_of(url).count(":") > 1:
            raise ValueError(f"must have a name or an IPv4 address such as 127.0.0.1, got {url!r}")
        return url

    @field_validator("clock", mode="before")
    @classmethod
    def _is_time(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                raise ValueError(
                    f"must be a time such as 2026-03-02T09:00:00Z, got {value!r}"
                ) from None
        if not isinstance(value, datetime):
            raise ValueError(f"must be a time such as 2026-03-02T09:00:00Z, got {value!r}")  # noqa: TRY004
        return value if value.tzinfo else value.replace(tzinfo=UTC)

    @field_validator("hosts")
    @classmethod
    def _are_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if "/" in host or " " in host or host.count(":") > 1:
                raise ValueError(
                    f"must be names such as cdn.example.com or 127.0.0.1:8000, got {host!r}"
                )
        return hosts

    @field_validator("size")
    @classmethod
    def _is_size(cls, size: tuple[int, int]) -> tuple[int, int]:
        if not (100 <= size[0] <= 4096 and 100 <= size[1] <= 4096):
            raise ValueError(f"must be 100x100 to 4096x4096, got {size[0]}x{size[1]}")
        return size

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if "{port}" in self.url and not self.start:
            raise ValueError(
                "url has {port}, the port of a server that dart starts; add start = [...]"
            )
        if self.start and "{port}" not in self.url:
            raise ValueError(
                "start needs {port} in url: each environment starts a server of its own at a port of its own"
            )
        if self.fresh and not self.start:
            raise ValueError("fresh starts the server anew for each episode; add start = [...]")
        return self


def host_of(url: str) -> str:
    """Return "name:port" of an address, in which {port} may stand for the port."""
    parts = urlsplit(url.replace("{port}", "1"))
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return ""
    return f"{parts.hostname}:{port}" if parts.hostname else ""
