"""Pictures of learning curves: a line for each arm, the range over its seeds as a band.

ArmLine    one arm's curves, one for each seed
ArmPanel   lines on one pair of axes
draw       panels side by side, a PNG
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.learning.curves import Points, band

PALETTE = (
    *("#2563eb", "#059669", "#d97706", "#db2777"),
    *("#7c3aed", "#0891b2", "#65a30d", "#b91c1c"),
)


@dataclass(frozen=True)
class ArmLine:
    """One arm."""

    label: str
    curves: Sequence[Points]
    colour: str
    is_bold: bool = False
    is_dashed: bool = False


@dataclass(frozen=True)
class ArmPanel:
    """Lines that are compared."""

    title: str
    x_label: str
    lines: Sequence[ArmLine]
    level: float | None = None  # drawn across


def draw(path: Path, panels: Sequence[ArmPanel], *, columns: int) -> None:
    """Write the panels, rows of `columns`, sharing their y axis: held-out success."""
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns, 3.8 * rows), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for panel, axis in zip(panels, axes, strict=False):
        for line in panel.lines:
            found = band(line.curves)
            width = 2.6 if line.is_bold else 1.4
            style = "--" if line.is_dashed else "-"
            axis.plot(
                found.x, found.mean, style, color=line.colour, linewidth=width, label=line.label
            )
            if len(line.curves) > 1:
                axis.fill_between(found.x, found.low, found.high, color=line.colour, alpha=0.13)
        if panel.level is not None:
            axis.axhline(panel.level, color="#6b7280", linewidth=0.8, linestyle=":")
        axis.set_title(panel.title, loc="left", fontsize=11)
        axis.set_xlabel(panel.x_label)
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, frameon=False)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("held-out success")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
