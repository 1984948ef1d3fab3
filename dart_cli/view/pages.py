"""Which page has which function: rows of the database -> values for its template.

    LISTS   pages of a run or of a list
    ITEMS   pages of one named thing

A page is a function of a Reader and asks it a bounded number of queries, each of which is answered
from an index or by one pass over the ledger without steps and images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dart_cli.data.store.reader import Reader
from dart_cli.view.header import Values
from dart_cli.view.overview import run, task, tasks
from dart_cli.view.query import Query
from dart_cli.view.records import group, groups, trajectories, trajectory
from dart_cli.view.site import Site

PageOf = Callable[[Reader, Site, Query], Values]

PageKind = Literal["run", "tasks", "groups", "trajectories"]
LISTS: dict[PageKind, PageOf] = {
    "run": run,
    "tasks": tasks,
    "groups": groups,
    "trajectories": trajectories,
}
ITEMS: dict[str, Callable[[Reader, Site, Query, str], Values]] = {
    "tasks": task,
    "groups": group,
    "trajectories": trajectory,
}
