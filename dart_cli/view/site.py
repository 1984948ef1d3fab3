"""Templates, addresses and queries, which all pages use.

Site          renders templates, and writes the addresses of pages and pictures
File          the same for one self-contained file, which has no addresses and each picture once
page_values   the values that every page shows: the run, and whether the browser reloads the page
Query         the parameters after the `?` of an address, checked
Page          a part of a long list, with `ROWS` rows; page_of returns the page that a query names
"""

from __future__ import annotations

import base64
import hashlib
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import ceil, isfinite
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from bus.error_texts import did_you_mean
from bus.errors import UserError
from dart_cli.evaluation.marks import step_words
from dart_cli.runtime.tables import minutes, moment, or_dash, verdict_words, versions
from envs.contract.blobs import image_type
from envs.contract.screenshots import seen_size

Values = dict[str, Any]
_Word = TypeVar("_Word", bound=str)

POLICY = (
    "default-src 'none'; img-src 'self'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
"""What a browser may load: the style sheet and images of this server, nothing else, and no script."""

LIVE_S = 20.0
"""A run is live if its newest heartbeat is younger. The data service stores heartbeats every 5 s."""
REFRESH_S = 5
"""Seconds after which the browser reloads a page of a live run."""


class Site:
    """The pages of a server: it renders their templates and makes their addresses."""

    exported = False
    policy = ""  # the content policy within the page; a server sends POLICY as a header instead

    def __init__(
        self,
        run_dir: Path,
        root: str = "",
        sections: tuple[str, ...] = ("tasks", "groups", "trajectories", "evaluations"),
    ) -> None:
        """Make the pages below the path `root`; every page links to the `sections`."""
        self.name = run_dir.resolve().name
        self.root = root
        self.sections = sections

    def page(self, *parts: str, **query: object) -> str:
        """Return the address of a page; empty in an exported file. Empty query values are left out."""
        path = self.root + "/" + "/".join(quote(part, safe="/") for part in parts)
        parameters = {key: str(value) for key, value in query.items() if value not in (None, "")}
        return path + (f"?{urlencode(parameters)}" if parameters else "")

    def picture(
        self,
        key: str,
        width: float,
        height: float,
        *,
        x: float = 0,
        y: float = 0,
        of: tuple[str, ...] = ("screenshots",),
    ) -> Markup:
        """Return an image within an SVG by its content hash; `of` is the first part of its address."""
        tag, href = self._image(key, of)
        return Markup('<{} href="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
            tag, href, x, y, width, height
        )

    def _image(self, key: str, of: tuple[str, ...]) -> tuple[str, str]:
        return "image", self.page(*of, key)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Return the page of a template. Every value is escaped unless it is Markup."""
        page = _environment().get_template(template)
        return page.render(site=self, style=stylesheet(), policy=self.policy, **values)


class File(Site):
    """The page of one exported file, which refers to no other file or server."""

    exported = True

    def __init__(self, run_dir: Path, images: Callable[[Iterable[str]], dict[str, bytes]]) -> None:
        """Make a file for a run. `images` returns encoded images by content hash."""
        super().__init__(run_dir)
        digest = base64.b64encode(hashlib.sha256(stylesheet().encode()).digest()).decode()
        # Only the style and the images of this file are allowed.
        allowed = f"img-src data:; style-src 'sha256-{digest}'"
        self.policy = f"default-src 'none'; {allowed}; base-uri 'none'"
        self._images = images
        self._used: dict[str, None] = {}

    def page(self, *parts: str, **_query: object) -> str:
        """Return the anchor of a screen of an exploration; empty for any other page."""
        return f"#screen-{parts[1]}" if len(parts) == 2 and parts[0] == "screens" else ""

    def _image(self, key: str, of: tuple[str, ...]) -> tuple[str, str]:
        del of
        self._used[key] = None
        return "use", f"#shot-{key}"

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Return the page with the images that it refers to at its end."""
        page = super().render(template, values)
        images = self._images(self._used).items() if self._used else ()
        symbols = Markup("").join(_symbol(key, image) for key, image in images)
        store = Markup('<svg class="store" width="0" height="0" aria-hidden="true">{}</svg></body>')
        return page.replace("</body>", store.format(symbols), 1)


def _symbol(key: str, image: bytes) -> Markup:
    """Return an embedded image as a symbol, to which any number of `use` elements can refer."""
    with Image.open(io.BytesIO(image)) as opened:
        width, height = seen_size(opened)
    data = f"data:{image_type(image)};base64,{base64.b64encode(image).decode()}"
    return Markup(
        '<symbol id="shot-{0}" viewBox="0 0 {2} {3}" preserveAspectRatio="none">'
        '<image href="{1}" width="{2}" height="{3}"/></symbol>'
    ).format(key, data, width, height)


def page_values(
    site: Site,
    query: Query,
    place: Path,
    *,
    run_id: str = "",
    silent_s: float | None = None,
    reload: bool = True,
) -> Values:
    """Return the values that every page shows.

    `silent_s` is the age of the newest heartbeat; None if there never was one. If the run is live and
    `reload`, the browser loads the page again every REFRESH_S seconds.
    """
    is_live = silent_s is not None and silent_s < LIVE_S
    paused = query.one_of("live", ("off",)) is not None
    return {
        "run_dir": str(place),
        "run_id": run_id,
        "is_live": is_live,
        "silent_s": silent_s,
        "refresh_s": REFRESH_S if is_live and reload and not (paused or site.exported) else 0,
        "paused": paused,
        "pause": query.address(live="" if paused else "off"),
        "made_at": time.time(),
    }


@cache
def stylesheet() -> str:
    """Return the one style sheet of all pages."""
    return (resources.files("dart_cli.view") / "static" / "view.css").read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dart_cli.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        moment=moment, minutes=minutes, words=step_words, dash=or_dash, verdict=verdict_words
    )
    environment.globals["versions"] = versions
    return environment


# --- queries -------------------------------------------------------------------------------

ROWS = 50
"""Rows of a page of a long list."""


class QueryError(UserError):
    """An error about a parameter of an address with an invalid value; the message lists valid ones."""


class Query:
    """The parameters after the `?` of an address."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = [(key, value) for key, value in pairs if value]
        self._words = dict(self._pairs)

    def one_of(self, name: str, choices: Sequence[_Word]) -> _Word | None:
        """Return the value of a parameter, None without it. Raises QueryError if it is not in `choices`."""
        value = self._words.get(name)
        return None if value is None else _member(name, value, choices)

    def several(self, name: str, choices: Sequence[_Word], most: int) -> list[_Word]:
        """Return the values of a parameter, each once. Raises QueryError for a value not in `choices`."""
        values = dict.fromkeys(value for key, value in self._pairs if key == name)
        if len(values) > most:
            raise QueryError(f"{len(values)} values of {name}: want {most} at most")
        return [_member(name, value, choices) for value in values]

    def whole(self, name: str, *, least: int = 0) -> int | None:
        """Return the value of a parameter as a whole number, None without it. Raises QueryError."""
        word = self._words.get(name)
        if word is None:
            return None
        if not (word.isascii() and word.isdigit() and len(word) < 16 and int(word) >= least):
            raise QueryError(f"{name}={word}: want a whole number from {least} on")
        return int(word)

    def number(self, name: str) -> float | None:
        """Return the value of a parameter as a finite number, None without it. Raises QueryError."""
        word = self._words.get(name)
        if word is None:
            return None
        with suppress(ValueError):
            if isfinite(value := float(word)):
                return value
        raise QueryError(f"{name}={word}: want a number")

    def address(self, **changes: str) -> str:
        """Return the address of the same page with some parameters changed; an empty one is removed."""
        others = [(key, value) for key, value in self._pairs if key not in changes]
        changed = [(key, value) for key, value in changes.items() if value]
        return "?" + urlencode([*others, *changed])


def _member(name: str, value: str, choices: Sequence[_Word]) -> _Word:
    """Return the value. Raises QueryError if it is not in `choices`."""
    if value in choices:
        return cast("_Word", value)
    raise QueryError(
        f"{name}={value}: there is no such {name}{did_you_mean(value, choices)}; "
        f"want one of {', '.join(choices)}"
    )


@dataclass(frozen=True)
class Page:
    """A part of a list of `total` rows, the newest first."""

    number: int  # from 1
    total: int

    @property
    def pages(self) -> int:
        """Number of pages."""
        return max(1, ceil(self.total / ROWS))

    @property
    def offset(self) -> int:
        """Number of rows on the pages before this one."""
        return (self.number - 1) * ROWS

    @property
    def last(self) -> int:
        """Number of the last row on this page."""
        return min(self.total, self.offset + ROWS)


def page_of(query: Query, total: int) -> Page:
    """Return the page that a query names, of a list of `total` rows. Raises QueryError beyond the last."""
    page = Page(query.whole("page", least=1) or 1, total)
    if page.number > page.pages:
        raise QueryError(f"page={page.number}: the last page is {page.pages}")
    return page
