"""How every table of a page looks.

page_table  an empty table with its title and columns
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table


def page_table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """A table as all pages show it; the columns named in `right` hold numbers."""
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table
