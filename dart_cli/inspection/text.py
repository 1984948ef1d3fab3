"""How values of a run are written for a person, the same on every page and table.

versions_words   which weights sampled a trajectory
seconds          times
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def versions_words(oldest: int | None, newest: int | None) -> str:
    """Which weights sampled a trajectory, in words."""
    if oldest is None or newest is None:
        return "no token sampled yet"
    return f"sampled by weights v{oldest}" + ("" if oldest == newest else f" to v{newest}")


def seconds(value: float | None) -> str:
    """Seconds to a tenth, without the unit; a dash for None."""
    return "-" if value is None else f"{value:.1f}"
