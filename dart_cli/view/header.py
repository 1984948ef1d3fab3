"""What all pages show: the run, its processes, whether the page is reloaded.

header      these values for any page
config_of   the configuration of the newest start
begun_at    when the run was first started
"""

from __future__ import annotations

import json
import time
from typing import Any

from bus.errors import StoreError
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import ProcessRow
from dart_cli.view.query import Query
from dart_cli.view.site import Site

Values = dict[str, Any]

LIVE_S = 20.0
"""A run is live if the newest heartbeat of a process is younger. `dart data` stores it every 5 s."""
REFRESH_S = 5
"""Seconds after which the browser reloads a page of a live run."""


def header(
    reader: Reader, site: Site, query: Query, *, is_list: bool = False, live: bool = True
) -> Values:
    """Header of a page: the run, its processes, whether the page is reloaded."""
    heard = reader.processes()
    now = time.time()
    alive = [process for process in heard if now - process.heard_at < LIVE_S]
    paused = query.one_of("live", ("off",)) is not None
    return {
        "run_dir": str(reader.path.parent),
        "run_id": _run_id(reader),
        "config": json.dumps(config_of(reader), indent=2),
        "processes": [_process(process, now) for process in heard],
        "is_live": bool(alive),
        "silent_s": min((now - process.heard_at for process in heard), default=None),
        "refresh_s": REFRESH_S
        if alive and live and not (paused or is_list or site.exported)
        else 0,
        "paused": paused,
        "made_at": now,
    }


def _process(row: ProcessRow, now: float) -> Values:
    return {"row": row, "silent_s": now - row.heard_at, "alive": now - row.heard_at < LIVE_S}


def begun_at(reader: Reader) -> float | None:
    """When the run was first started, unix seconds; None before."""
    try:
        return reader.run().created_at
    except StoreError:  # never started: nothing but a pool
        return None


def _run_id(reader: Reader) -> str:
    try:
        return reader.run().id
    except StoreError:  # never started: nothing but a pool
        return "not started yet"


def config_of(reader: Reader) -> Values:
    """The configuration of the newest start; empty before the first."""
    try:
        found = json.loads(reader.run().config)
    except StoreError:
        return {}
    return found if isinstance(found, dict) else {}
