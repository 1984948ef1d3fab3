"""The pages on a socket: which address shows what, and the life of the server.

run_view   serves until a signal ends it: the `dart view` verb
make_app   the ASGI application of one run directory
listen     a socket that is bound already, so that a taken port is told before anything starts
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bus.errors import DartError, RunDirectoryError, StoreError, UserError
from bus.loopback import is_loopback
from dart_cli.data.store.open import DATABASE, open_reader
from dart_cli.view import pages
from dart_cli.view.guard import Guard
from dart_cli.view.header import Values
from dart_cli.view.overview import run_row
from dart_cli.view.query import Query, QueryError
from dart_cli.view.site import Site, image_type, stylesheet

LOOPBACK = "127.0.0.1"
FIRST_PORT = 8470
"""Where the server is found unless it is taken or another is named."""
_PORTS = 20  # tried from there on

MOST_REQUESTS = 64
"""Requests in work at once; the next one is told to come back (503)."""
MOST_RUNS = 50
"""Runs of a folder that are listed, those written to last."""
_STOP_S = 3
_DAY_S = 24 * 3600


def run_view(
    place: Path, *, host: str = LOOPBACK, port: int | None = None, guarded: bool = False
) -> None:
    """Serve the pages of a run, or of a folder of runs, until SIGINT or SIGTERM.

    The address is printed first; beyond loopback, or where it is asked for (`guarded`), with a
    token. Raises RunDirectoryError where there is no run, UserError where the address cannot be had.
    """
    if is_run(place):
        with open_reader(place):
            pass  # that a run of another schema is told here and not in the browser
    token = secrets.token_urlsafe(24) if guarded or not is_loopback(host) else ""
    with closing(listen(host, port)) as listener:
        bound = listener.getsockname()[1]
        sys.stderr.write(f"{place}: {address(host, bound, token)}\nCtrl-C ends it\n")
        sys.stderr.flush()
        make_server(make_app(place, host=host, token=token)).run(sockets=[listener])


def make_server(app: ASGIApp) -> uvicorn.Server:
    """A server with our bounds; `run(sockets=[...])` serves."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=MOST_REQUESTS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=_STOP_S,
            proxy_headers=False,
            lifespan="off",
            ws="none",
        )
    )


def address(host: str, port: int, token: str) -> str:
    """What to open in a browser."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket on `port`, 0 for any; without one the first that is free of ours.

    Raises UserError.
    """
    wanted = range(FIRST_PORT, FIRST_PORT + _PORTS) if port is None else (port,)
    why = "nothing"
    for each in wanted:
        try:
            family = socket.getaddrinfo(host, each, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, each), family=family)
        except UnicodeError:
            raise UserError(
                f"--host {host}: is no name of a host; name an address of this one, e.g. {LOOPBACK}"
            ) from None
        except OSError as error:
            why = error.strerror or str(error)
    cure = "name a free one, or --port 0 for any" if port is not None else "name one with --port"
    raise UserError(f"--host {host}: port {wanted[-1]} cannot be served on: {why}; {cure}")


# --- addresses ------------------------------------------------------------------------------


def make_app(place: Path, *, host: str = LOOPBACK, token: str = "") -> ASGIApp:
    """The application of a run, or of a folder of runs; it answers under the name `host` alone."""
    app = _run_app(place, Site(place)) if is_run(place) else _runs_app(place)
    return Guard(app, host=host, token=token)


def is_run(place: Path) -> bool:
    """Whether the directory is a run; else it may hold some."""
    return (place / DATABASE).is_file()


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, the one written to last first. Links are not followed."""
    try:
        found = [run for run in folder.iterdir() if not run.is_symlink() and is_run(run)]
    except OSError:  # moved away, or closed to us: as good as empty
        return []
    return sorted(found, key=_written_at, reverse=True)


def _written_at(run: Path) -> float:
    """When its database or the log of that was written to, unix seconds."""
    moments = [0.0]
    for name in (DATABASE, f"{DATABASE}-wal"):
        with suppress(OSError):  # the log goes when the last one closes the database
            moments.append((run / name).stat().st_mtime)
    return max(moments)


def _run_app(run_dir: Path, site: Site) -> Starlette:
    """The pages of one run."""

    def list_page(kind: pages.PageKind) -> Callable[[Request], Response]:
        def show(request: Request) -> Response:
            query = Query(request.query_params)
            with open_reader(run_dir) as reader:
                values = pages.LISTS[kind](reader, site, query)
            return HTMLResponse(site.render(f"{kind}.html", values))

        return show

    def item_page(kind: str) -> Callable[[Request], Response]:
        def show(request: Request) -> Response:
            query = Query(request.query_params)
            with open_reader(run_dir) as reader:
                values = pages.ITEMS[kind](reader, site, query, request.path_params["name"])
            return HTMLResponse(site.render(f"{_ONE[kind]}.html", values))

        return show

    def screenshot(request: Request) -> Response:
        key = request.path_params["key"]
        with open_reader(run_dir) as reader:
            image = reader.screenshots([key]).get(key, b"")
        kind = image_type(image)
        if kind is None:
            raise UserError(f"no screenshot {key} in this run")
        # Named by its content, it never changes; only this browser may keep it.
        caching = {"cache-control": f"private, max-age={_DAY_S}, immutable"}
        return Response(image, media_type=kind, headers=caching)

    routes = [
        Route("/", list_page("run")),
        Route("/tasks", list_page("tasks")),
        Route("/groups", list_page("groups")),
        Route("/trajectories", list_page("trajectories")),
        Route("/tasks/{name:path}", item_page("tasks")),
        Route("/groups/{name}", item_page("groups")),
        Route("/trajectories/{name}", item_page("trajectories")),
        Route("/screenshots/{key}", screenshot),
        Route("/view.css", _style),
    ]
    return Starlette(routes=routes, exception_handlers=_handlers(site))


def _runs_app(folder: Path) -> Starlette:
    """A list of the runs in a folder, and the pages of each below /runs/NAME."""
    site = Site(folder)
    apps: dict[Path, Starlette] = {}

    def show(_request: Request) -> Response:
        runs = runs_in(folder)
        rows = [{"name": run.name, **_row(run)} for run in runs[:MOST_RUNS]]
        values = {"rows": rows, "more": max(0, len(runs) - MOST_RUNS)}
        return HTMLResponse(site.render("runs.html", values))

    async def one(scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request to the run of that name, which must be one of those that are there."""
        name = scope["path_params"]["run"]
        run = next((run for run in runs_in(folder) if run.name == name), None)
        if run is None:
            raise UserError(f"no run {name} in {folder}; the page of runs lists them")
        if run not in apps:
            apps[run] = _run_app(run, Site(run, site.page("runs", name)))
        await apps[run](scope, receive, send)

    routes = [Route("/", show), Route("/view.css", _style), Mount("/runs/{run}", app=one)]
    return Starlette(routes=routes, exception_handlers=_handlers(site))


def _row(run: Path) -> Values:
    """What the list tells of a run, or why it cannot be read."""
    try:
        with open_reader(run) as reader:
            return {"fault": "", **run_row(reader)}
    except DartError as error:
        return {"fault": str(error)}


def _style(_request: Request) -> Response:
    return Response(stylesheet(), media_type="text/css")


def _handlers(site: Site) -> dict[Any, Callable[[Request, Exception], Response]]:
    """Every error is a page that says what to do."""

    def told(_request: Request, error: Exception) -> Response:
        status, text = _told(error)
        values = {"title": status.phrase, "text": text}
        return HTMLResponse(site.render("error.html", values), status)

    return {DartError: told, HTTPException: told, Exception: told}


_ONE = {"tasks": "task", "groups": "group", "trajectories": "trajectory"}


def _told(error: Exception) -> tuple[HTTPStatus, str]:
    """Status and sentence of an error page."""
    match error:
        case QueryError():
            return HTTPStatus.BAD_REQUEST, str(error)
        case RunDirectoryError() | StoreError():  # moved, damaged, busy: the page may work again
            return HTTPStatus.SERVICE_UNAVAILABLE, str(error)
        case UserError():
            return HTTPStatus.NOT_FOUND, str(error)
        case HTTPException(status_code=HTTPStatus.NOT_FOUND):
            return HTTPStatus.NOT_FOUND, "There is no such page; begin at the run's."
        case HTTPException():
            return HTTPStatus(error.status_code), error.detail
    return HTTPStatus.INTERNAL_SERVER_ERROR, "The page could not be made; the terminal tells why."
