"""What all pages are made with: templates, the addresses and pictures that they write, queries.

Site          renders templates; addresses below `/`
File          the same for one self-contained file: no addresses, each picture once within it
page_values   what every page shows: which run, and whether it is loaded again
Query         the parameters behind the `?` of an address, checked
Page          part of a long list, `ROWS` to a page; page_of, the one that a query asks for
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
from dart_cli.evaluation.marks import action_words
from dart_cli.runtime.tables import minutes, moment, or_dash, verdict_words, versions
from envs.contract.blobs import image_type
from envs.contract.screenshots import seen_size

Values = dict[str, Any]
_Word = TypeVar("_Word", bound=str)

POLICY = (
    "default-src 'none'; img-src 'self'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
"""What a browser may load and do: our style and images, nothing else, no script at all."""

LIVE_S = 20.0
"""A run is live if the newest heartbeat of a process is younger. `dart data` stores it every 5 s."""
REFRESH_S = 5
"""Seconds after which the browser reloads a page of a live run."""


class Site:
    """Pages of a server."""

    exported = False
    policy = ""  # in the page itself; a server sends POLICY

    def __init__(
        self,
        run_dir: Path,
        root: str = "",
        sections: tuple[str, ...] = ("tasks", "groups", "trajectories", "evaluations"),
    ) -> None:
        """`root` is the path below which the pages are; every page links to the `sections`."""
        self.name = run_dir.resolve().name
        self.root = root
        self.sections = sections

    def page(self, *parts: str, **query: object) -> str:
        """Address of a page; empty in an exported file. Query values that are None are left out."""
        path = self.root + "/" + "/".join(quote(part, safe="/") for part in parts)
        wanted = {key: str(value) for key, value in query.items() if value not in (None, "")}
        return path + (f"?{urlencode(wanted)}" if wanted else "")

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
        """Return an image within an SVG, by its content hash; `of` is the first part of its address."""
        tag, href = self._image(key, of)
        return Markup('<{} href="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
            tag, href, x, y, width, height
        )

    def _image(self, key: str, of: tuple[str, ...]) -> tuple[str, str]:
        return "image", self.page(*of, key)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Return the page; every value is escaped unless it is Markup."""
        page = _environment().get_template(template)
        return page.render(site=self, style=stylesheet(), policy=self.policy, **values)


class File(Site):
    """Pages that go into one file, which refers to no other file or server."""

    exported = True

    def __init__(self, run_dir: Path, images: Callable[[Iterable[str]], dict[str, bytes]]) -> None:
        """`images` gives encoded images by content hash."""
        super().__init__(run_dir)
        digest = base64.b64encode(hashlib.sha256(stylesheet().encode()).digest()).decode()
        allowed = f"img-src data:; style-src 'sha256-{digest}'"  # its own style, images within it
        self.policy = f"default-src 'none'; {allowed}; base-uri 'none'"
        self._images = images
        self._used: dict[str, None] = {}

    def page(self, *parts: str, **_query: object) -> str:
        """Return the part of the file for a screen of an exploration; empty for anything else."""
        return f"#screen-{parts[1]}" if len(parts) == 2 and parts[0] == "screens" else ""

    def _image(self, key: str, of: tuple[str, ...]) -> tuple[str, str]:
        del of
        self._used[key] = None
        return "use", f"#shot-{key}"

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Return the page, and the images that it refers to at its end."""
        page = super().render(template, values)
        images = self._images(self._used).items() if self._used else ()
        symbols = Markup("").join(_symbol(key, image) for key, image in images)
        store = Markup('<svg class="store" width="0" height="0" aria-hidden="true">{}</svg></body>')
        return page.replace("</body>", store.format(symbols), 1)


def _symbol(key: str, image: bytes) -> Markup:
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
    """Return what every page shows; that of a live run is loaded again where it may change by itself.

    `silent_s`: since the run was last heard, if it ever was.
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
        moment=moment, minutes=minutes, words=action_words, dash=or_dash, verdict=verdict_words
    )
    environment.globals["versions"] = versions
    return environment


# --- queries -------------------------------------------------------------------------------

ROWS = 50
"""Rows of a long list on one page."""


class QueryError(UserError):
    """A parameter behind `?` has no valid value; the message lists the valid ones."""


class Query:
    """The parameters behind the `?` of an address."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = [(key, value) for key, value in pairs if value]
        self._words = dict(self._pairs)

    def one_of(self, name: str, known: Sequence[_Word]) -> _Word | None:
        """Return the parameter's value, which must be in `known`, or None. Raises QueryError."""
        value = self._words.get(name)
        return None if value is None else _member(name, value, known)

    def several(self, name: str, known: Sequence[_Word], most: int) -> list[_Word]:
        """Return the parameter's values, each once, which must be in `known`. Raises QueryError."""
        values = dict.fromkeys(value for key, value in self._pairs if key == name)
        if len(values) > most:
            raise QueryError(f"{len(values)} values of {name}: want {most} at most")
        return [_member(name, value, known) for value in values]

    def whole(self, name: str, *, least: int = 0) -> int | None:
        """Return a whole number, or None. Raises QueryError."""
        asked = self._words.get(name)
        if asked is None:
            return None
        if not (asked.isascii() and asked.isdigit() and len(asked) < 16 and int(asked) >= least):
            raise QueryError(f"{name}={asked}: want a whole number from {least} on")
        return int(asked)

    def number(self, name: str) -> float | None:
        """Return a finite number, or None. Raises QueryError."""
        word = self._words.get(name)
        if word is None:
            return None
        with suppress(ValueError):
            if isfinite(value := float(word)):
                return value
        raise QueryError(f"{name}={word}: want a number")

    def address(self, **changes: str) -> str:
        """Return the address of the same page with some parameters changed; an empty one is left out."""
        kept = [(key, value) for key, value in self._pairs if key not in changes]
        return "?" + urlencode([*kept, *((key, value) for key, value in changes.items() if value)])


def _member(name: str, value: str, known: Sequence[_Word]) -> _Word:
    """Return the value, which must be in `known`. Raises QueryError."""
    if value in known:
        return cast("_Word", value)
    raise QueryError(
        f"{name}={value}: there is no such {name}{did_you_mean(value, known)}; "
        f"want one of {', '.join(known)}"
    )


@dataclass(frozen=True)
class Page:
    """Part of a list of `total` rows, the newest first."""

    number: int  # from 1
    total: int

    @property
    def pages(self) -> int:
        """Number of pages."""
        return max(1, ceil(self.total / ROWS))

    @property
    def offset(self) -> int:
        """Rows on the pages before."""
        return (self.number - 1) * ROWS

    @property
    def last(self) -> int:
        """Number of the last row on it."""
        return min(self.total, self.offset + ROWS)


def page_of(query: Query, total: int) -> Page:
    """Return the page of a list of `total` rows that `query` asks for. Raises QueryError beyond the last."""
    page = Page(query.whole("page", least=1) or 1, total)
    if page.number > page.pages:
        raise QueryError(f"page={page.number}: the last page is {page.pages}")
    return page
