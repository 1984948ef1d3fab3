"""Templates, and the addresses that they write: those of a server, or none in an exported file.

Site          renders templates; addresses below `/`
File          the same for one self-contained file: no addresses, images within it
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from dart_cli.runtime.tables import minutes, moment, verdict_words, versions
from envs.base import image_type

POLICY = {
    "default-src": "'none'",
    "img-src": "'self'",
    "style-src": "'self'",
    "form-action": "'self'",
    "base-uri": "'none'",
    "frame-ancestors": "'none'",
}
"""What a browser may load and do: our style and images, nothing else, no script at all."""


class Site:
    """Pages of a server."""

    exported = False
    sections: tuple[str, ...] = ("tasks", "groups", "trajectories", "evaluations")
    """Pages that every page links to."""

    def __init__(self, run_dir: Path, root: str = "") -> None:
        """`root` is the path below which the run's pages are, where there are several runs."""
        self.name = run_dir.resolve().name
        self.root = root
        self._environment = _environment()

    def page(self, *parts: str, **query: object) -> str:
        """Address of a page; empty in an exported file. Query values that are None are left out."""
        path = self.root + "/" + "/".join(quote(part, safe="/") for part in parts)
        wanted = {key: str(value) for key, value in query.items() if value not in (None, "")}
        return path + (f"?{urlencode(wanted)}" if wanted else "")

    def image(self, key: str) -> str:
        """Address of a screenshot by its content hash."""
        return self.page("screenshots", key)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """The page; every value is escaped unless it is Markup."""
        return self._environment.get_template(template).render(
            site=self, style=stylesheet(), policy="", **values
        )


class File(Site):
    """Pages that go into one file, which refers to no other file or server."""

    exported = True

    def __init__(self, run_dir: Path, images: Callable[[Iterable[str]], dict[str, bytes]]) -> None:
        """`images` gives encoded screenshots by content hash."""
        super().__init__(run_dir)
        self._images = images

    def page(self, *_parts: str, **_query: object) -> str:
        """No other page can be reached from a file."""
        return ""

    def image(self, key: str) -> str:
        """The screenshot itself, as a data: address; empty where it was deleted."""
        image = self._images([key]).get(key, b"")
        kind = image_type(image)
        return f"data:{kind};base64,{base64.b64encode(image).decode()}" if kind else ""

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """The page, with its own policy: its style by hash, images within it, nothing else."""
        digest = base64.b64encode(hashlib.sha256(stylesheet().encode()).digest()).decode()
        policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'"
        return self._environment.get_template(template).render(
            site=self, style=stylesheet(), policy=policy, **values
        )


@cache
def stylesheet() -> str:
    """The one style sheet of all pages."""
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
        moment=lambda at: "-" if at is None else moment(at),
        minutes=minutes,
        number=lambda value: "-" if value is None else f"{value:.4g}",
        nats=lambda value: "-" if value is None else f"{value:.3f}",
        share=lambda value: "-" if value is None else f"{value:.2f}",
        signed=lambda value: f"{value:+.3f}",
        versions=lambda pair: versions(*pair),
        verdict=verdict_words,
    )
    return environment
