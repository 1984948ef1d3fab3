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
from contextlib import closing
from http import HTTPStatus
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from bus.errors import DartError, RunDirectoryError, StoreError, UserError
from dart_cli.data.store import open_reader
from dart_cli.view import pages
from dart_cli.view.guard import Guard, is_loopback
from dart_cli.view.site import Site, image_type, stylesheet

LOOPBACK = "127.0.0.1"
FIRST_PORT = 8470
"""Where the server is found unless it is taken or another is named."""
_PORTS = 20  # tried from there on

MOST_REQUESTS = 64
"""Requests in work at once; the next one is told to come back (503)."""
_STOP_S = 3
_DAY_S = 24 * 3600


def run_view(
    run_dir: Path, *, host: str = LOOPBACK, port: int | None = None, guarded: bool = False
) -> None:
    """Serve the pages of a run until SIGINT or SIGTERM; the address is printed first.

    Beyond loopback, or where it is asked for (`guarded`), a token is printed with it. Raises RunDirectoryError where there is no
    run, UserError where the address cannot be had.
    """
    with open_reader(run_dir):
        pass  # that a run of another schema is told here and not in the browser
    token = secrets.token_urlsafe(24) if guarded or not is_loopback(host) else ""
    with closing(listen(host, port)) as listener:
        bound = listener.getsockname()[1]
        sys.stderr.write(f"{run_dir}: {address(host, bound, token)}\nCtrl-C ends it\n")
        sys.stderr.flush()
        make_server(make_app(run_dir, host=host, token=token)).run(sockets=[listener])


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
    fault: OSError | None = None
    for each in wanted:
        try:
            family = socket.getaddrinfo(host, each, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, each), family=family)
        except OSError as error:
            fault = error
    cure = "name a free one, or --port 0 for any" if port is not None else "name one with --port"
    why = "nothing" if fault is None else fault.strerror
    raise UserError(f"--host {host}: port {wanted[-1]} cannot be served on: {why}; {cure}")


# --- addresses ------------------------------------------------------------------------------


def make_app(run_dir: Path, *, host: str = LOOPBACK, token: str = "") -> ASGIApp:
    """The application of one run; served on `host`, it answers under that name alone."""
    site = Site(run_dir)

    def list_page(kind: pages.Kind) -> Callable[[Request], Response]:
        def show(request: Request) -> Response:
            query = pages.Query(request.query_params)
            with open_reader(run_dir) as reader:
                values = pages.LISTS[kind](reader, site, query)
            return HTMLResponse(site.render(f"{kind}.html", values))

        return show

    def item_page(kind: str) -> Callable[[Request], Response]:
        def show(request: Request) -> Response:
            query = pages.Query(request.query_params)
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

    def style(_request: Request) -> Response:
        return Response(stylesheet(), media_type="text/css")

    def told(_request: Request, error: Exception) -> Response:
        status, text = _told(error)
        values = {"title": status.phrase, "text": text}
        return HTMLResponse(site.render("error.html", values), status)

    routes = [
        Route("/", list_page("run")),
        Route("/tasks", list_page("tasks")),
        Route("/groups", list_page("groups")),
        Route("/trajectories", list_page("trajectories")),
        Route("/tasks/{name:path}", item_page("tasks")),
        Route("/groups/{name}", item_page("groups")),
        Route("/trajectories/{name}", item_page("trajectories")),
        Route("/screenshots/{key}", screenshot),
        Route("/view.css", style),
    ]
    handlers = {DartError: told, HTTPException: told, Exception: told}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(app, host=host, token=token)


_ONE = {"tasks": "task", "groups": "group", "trajectories": "trajectory"}


def _told(error: Exception) -> tuple[HTTPStatus, str]:
    """Status and sentence of an error page."""
    match error:
        case pages.QueryError():
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
