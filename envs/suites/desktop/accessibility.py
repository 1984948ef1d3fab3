"""The accessibility tree of a desktop: what applications report to a screen reader about their widgets.

has_accessibility   returns whether this host has the packages that read the tree
read_widgets        returns the widgets of one desktop
outline_of          returns the widgets on the screen as text, for a policy

Applications report their widgets through AT-SPI on the desktop's own message bus, and only if the desktop
was started with `accessible`, since reporting costs them time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bus.errors import EnvError
from envs.contract.observed_texts import Widget, outline
from envs.tools.atspi_tree import in_place

if TYPE_CHECKING:
    from envs.suites.desktop.desktop import Desktop

PACKAGES = "at-spi2-core python3-gi gir1.2-atspi-2.0"

_PYTHON = "/usr/bin/python3"  # Debian's, for which the packages are
_BINDINGS = "/usr/lib/python3/dist-packages/gi"
_LAUNCHER = "/usr/libexec/at-spi-bus-launcher"
_READER = Path(__file__).with_name("atspi.py")


def has_accessibility() -> bool:
    """Return True if PACKAGES are installed."""
    typelibs = Path("/usr/lib").glob("*/girepository-1.0/Atspi-2.0.typelib")
    return all(Path(path).exists() for path in (_PYTHON, _LAUNCHER, _BINDINGS)) and any(typelibs)


def read_widgets(desktop: Desktop) -> list[dict[str, Any]]:
    """Return role, name, text, states and box of each widget, depth first. Raises EnvError."""
    output = desktop.run("atspi", [_PYTHON, "-W", "ignore", "-c", _READER.read_text("utf-8")])
    try:
        widgets: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise EnvError(
            f"the accessibility tree cannot be read ({error}); its reader wrote {output[-200:]!r}; "
            f"are the packages {PACKAGES} installed as Debian has them?"
        ) from error
    return in_place(widgets)


def outline_of(widgets: Iterable[Mapping[str, Any]]) -> str:
    """Return a line for each widget of `read_widgets` on the screen that has a name or a text."""
    showing = (widget for widget in widgets if widget["showing"] and widget["box"])
    return outline(
        Widget(widget["role"], widget["name"] or "", widget["text"] or "", tuple(widget["box"]))
        for widget in showing
        if min(widget["box"][2:]) > 0
    )
