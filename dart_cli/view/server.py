"""The server of the pages, and the export of a page into one file.

run_view     serves the pages until a signal ends it: the `dart view` command
make_app     returns the ASGI application of a run, of an exploration, of evaluations, or of a folder of runs
Guard        decides which requests may see the pages, and adds security headers to every response
write_file   writes one self-contained HTML file: a trajectory, the page of the run, or an exploration
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bus.endpoints import is_loopback
from bus.errors import DartError, RunDirectoryError, StoreError, UserError
from dart_cli.data.store.open import DATABASE, open_reader
from dart_cli.evaluation.results import evaluations_in
from dart_cli.explore.graph import DATABASE as GRAPH
from dart_cli.explore.graph import GraphReader, read_graph
from dart_cli.inspection.run_lookup import written_at
from dart_cli.runtime.http_server import LOOPBACK, HttpGuard, address, listen, make_server
from dart_cli.view import compare_pages, evaluation_pages, graph_pages, run_pages
from dart_cli.view.screenshot_svg import reduced
from dart_cli.view.site import POLICY, File, Query, QueryError, Site, Values, stylesheet
from envs.contract.blobs import image_type

FIRST_PORT = 8470
"""The default port. If it is taken, the next free one is used."""
MOST_REQUESTS = 64
"""Requests that are served at once; a further request gets the status 503."""
MOST_RUNS = 50
"""Runs of a folder that are listed, at most: the most recently written ones."""
SMALL = 264
"""Width in pixels of a screen in the picture of a graph: twice its width on the page."""
EXPORTED = 640
"""Width in pixels of a screenshot of an exploration in an exported file, at most."""
_DAY_S = 24 * 3600
_SHOT = re.compile(r"[0-9a-f]{32}")  # the name of a screenshot of an exploration

_Pages = Mapping[str, tuple[str, Callable[..., Values]]]
"""Address -> its template, and the function that returns its values for (source, site, query, name)."""

RUN_PAGES: _Pages = {
    "/": ("run.html", run_pages.run),
    "/tasks": ("tasks.html", run_pages.tasks),
    "/groups": ("groups.html", run_pages.groups),
    "/trajectories": ("trajectories.html", run_pages.trajectories),
    "/tasks/{name:path}": ("task.html", run_pages.task),
    "/groups/{name}": ("group.html", run_pages.group),
    "/trajectories/{name}": ("trajectory.html", run_pages.trajectory),
}
EVALUATION_PAGES: _Pages = {
    "/evaluations": ("evaluations.html", evaluation_pages.evaluations),
    "/evaluations/{name}": ("evaluation.html", evaluation_pages.evaluation),
}
GRAPH_PAGES: _Pages = {
    "/": ("graph.html", graph_pages.overview),
    "/steps": ("graph_steps.html", graph_pages.steps),
    "/merges": ("graph_merges.html", graph_pages.merges),
    "/screens/{name}": ("graph_screen.html", graph_pages.screen),
}


def run_view(
    place: Path, *, host: str = LOOPBACK, port: int | None = None, guarded: bool = False
) -> None:
    """Serve the pages of a run, of an exploration, or of a folder of runs, until SIGINT or SIGTERM.

    The address is printed first; it has a token if the host is not loopback, or with `guarded`. Raises
    RunDirectoryError if there is no run, UserError if the address cannot be used.
    """
    # A run or a graph of another schema must be an error here and not in the browser.
    if is_run(place):
        open_reader(place).close()
    elif is_graph(place):
        read_graph(place).close()
    token = secrets.token_urlsafe(24) if guarded or not is_loopback(host) else ""
    with closing(listen(host, port, FIRST_PORT)) as listener:
        url = address(host, listener.getsockname()[1]) + (f"?token={token}" if token else "")
        sys.stderr.write(f"{place}: {url}\nCtrl-C ends it\n")
        sys.stderr.flush()
        make_server(make_app(place, host=host, token=token), MOST_REQUESTS).run(sockets=[listener])


# --- addresses ------------------------------------------------------------------------------


def make_app(place: Path, *, host: str = LOOPBACK, token: str = "") -> ASGIApp:
    """Return the application for the content of `place`. It answers only requests for `host`."""
    if is_run(place):
        app = _run_app(place, Site(place))
    elif is_graph(place):
        app = _graph_app(place)
    elif has_evaluations(place):
        app = _evaluated_app(place)
    else:
        app = _runs_app(place)
    return Guard(app, host=host, token=token)


def is_run(place: Path) -> bool:
    """Return True if the directory is a run; otherwise it may contain runs."""
    return (place / DATABASE).is_file()


def is_graph(place: Path) -> bool:
    """Return True if `dart explore` wrote the directory."""
    return (place / GRAPH).is_file()


def has_evaluations(place: Path) -> bool:
    """Return True if the directory has evaluations of `dart eval`. It need not be a run."""
    return bool(evaluations_in(place))


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, the most recently written one first. Links are not followed."""
    try:
        runs = [run for run in folder.iterdir() if not run.is_symlink() and is_run(run)]
    except OSError:  # a folder that was moved or cannot be read counts as empty
        return []
    return sorted(runs, key=lambda run: written_at(run / DATABASE), reverse=True)


def _run_app(run_dir: Path, site: Site) -> Starlette:
    """Return the application with the pages of one run."""

    def screenshot(key: str) -> bytes:
        with open_reader(run_dir) as reader:
            return reader.screenshots([key]).get(key, b"")

    return _app(
        site,
        *_pages(site, lambda: open_reader(run_dir), RUN_PAGES),
        _pictures("/screenshots/{key}", screenshot),
        *_pages(site, lambda: nullcontext(run_dir), EVALUATION_PAGES),
        _shots(run_dir),
    )


def _evaluated_app(run_dir: Path) -> Starlette:
    """Return the application with the evaluations of a directory that is not a run."""
    site, pages = Site(run_dir, sections=("evaluations",)), {**EVALUATION_PAGES}
    pages["/"] = pages["/evaluations"]
    return _app(site, *_pages(site, lambda: nullcontext(run_dir), pages), _shots(run_dir))


def _graph_app(folder: Path) -> Starlette:
    """Return the application with the pages of one exploration."""
    site = Site(folder, sections=("steps", "merges"))

    def whole(key: str) -> bytes:
        if not _SHOT.fullmatch(key):
            return b""
        with read_graph(folder) as graph:
            return graph.screenshot(key)

    @lru_cache(maxsize=512)
    def small(key: str) -> bytes:
        return reduced(whole(key), SMALL)

    return _app(
        site,
        *_pages(site, lambda: read_graph(folder), GRAPH_PAGES),
        _pictures("/screenshots/{key}", whole),
        _pictures("/small/{key}", small),
    )


def _runs_app(folder: Path) -> Starlette:
    """Return the application of a folder of runs: the list, a comparison, and each run below /runs/NAME."""
    site = Site(folder, sections=("compare",))
    apps: dict[Path, Starlette] = {}

    def show(_request: Request) -> Response:
        runs = runs_in(folder)
        rows = [{"name": run.name, **_row(run)} for run in runs[:MOST_RUNS]]
        values = {"rows": rows, "more": max(0, len(runs) - MOST_RUNS)}
        return HTMLResponse(site.render("runs.html", values))

    def compare(request: Request) -> Response:
        values = compare_pages.compare(runs_in(folder), Query(request.query_params.multi_items()))
        return HTMLResponse(site.render("compare.html", values))

    async def one(scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on to the run of that name. Raises UserError if the folder has no such run."""
        name = scope["path_params"]["run"]
        run = next((run for run in runs_in(folder) if run.name == name), None)
        if run is None:
            raise UserError(f"no run {name} in {folder}; the page of runs lists its runs")
        if run not in apps:
            apps[run] = _run_app(run, Site(run, site.page("runs", name)))
        await apps[run](scope, receive, send)

    return _app(site, Route("/", show), Route("/compare", compare), Mount("/runs/{run}", app=one))


def _row(run: Path) -> Values:
    """Return the row of a run in the list of runs, or why it cannot be read."""
    try:
        with open_reader(run) as reader:
            return {"fault": "", **run_pages.run_row(reader)}
    except DartError as error:
        return {"fault": str(error)}


def _pages(
    site: Site, opened: Callable[[], AbstractContextManager[Any]], pages: _Pages
) -> list[Route]:
    """Return a route for each page, which opens its source for each request."""

    def route(path: str, template: str, values_of: Callable[..., Values]) -> Route:
        def show(request: Request) -> Response:
            query, names = Query(request.query_params.multi_items()), request.path_params
            with opened() as source:
                if "name" in names:
                    values = values_of(source, site, query, names["name"])
                else:
                    values = values_of(source, site, query)
            return HTMLResponse(site.render(template, values))

        return Route(path, show)

    return [route(path, template, values_of) for path, (template, values_of) in pages.items()]


def _shots(run_dir: Path) -> Route:
    """Return the route of the screenshots in the films of evaluations."""
    return _pictures(
        "/evaluations/{name}/shots/{key}",
        lambda name, key: evaluation_pages.shot(run_dir, name, key),
    )


def _pictures(path: str, read: Callable[..., bytes]) -> Route:
    """Return a route of images by content hash. They never change, and only this browser may cache them."""

    def show(request: Request) -> Response:
        names = {key: request.path_params[key] for key in ("name", "key") if f"{{{key}}}" in path}
        image = read(**names)
        kind = image_type(image)
        if kind is None:
            raise UserError(f"no screenshot {names['key']} here")
        caching = {"cache-control": f"private, max-age={_DAY_S}, immutable"}
        return Response(image, media_type=kind, headers=caching)

    return Route(path, show)


def _app(site: Site, *routes: BaseRoute) -> Starlette:
    """Return an application of routes and the style sheet, in which every error is a page with a fix."""

    def style(_request: Request) -> Response:
        return Response(stylesheet(), media_type="text/css")

    def error_page(_request: Request, error: Exception) -> Response:
        status, text = _status_and_text(error)
        values = {"title": status.phrase, "text": text}
        return HTMLResponse(site.render("error.html", values), status)

    handlers: dict[Any, Callable[[Request, Exception], Response]] = dict.fromkeys(
        (DartError, HTTPException, Exception), error_page
    )
    return Starlette(routes=[*routes, Route("/view.css", style)], exception_handlers=handlers)


def _status_and_text(error: Exception) -> tuple[HTTPStatus, str]:
    """Return the HTTP status and the text of an error page."""
    match error:
        case QueryError():
            return HTTPStatus.BAD_REQUEST, str(error)
        # The run was moved, is damaged or busy: the page may work again later.
        case RunDirectoryError() | StoreError():
            return HTTPStatus.SERVICE_UNAVAILABLE, str(error)
        case UserError():
            return HTTPStatus.NOT_FOUND, str(error)
        case HTTPException(status_code=HTTPStatus.NOT_FOUND):
            return HTTPStatus.NOT_FOUND, "There is no such page; start at the first page."
        case HTTPException():
            return HTTPStatus(error.status_code), error.detail
    return (
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "The page could not be rendered; the terminal of `dart view` shows the error.",
    )


# --- who may look ----------------------------------------------------------------------------


class Guard(HttpGuard):
    """A guard that passes a request on to the pages, or refuses it.

    If the server has a token, every request needs it: first in the address (`?token=...`), then as a cookie
    that no script can read.
    """

    methods = ("GET", "HEAD")
    headers = {  # noqa: RUF012 - a constant
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
    wrong_host = "This server answers only under its own name; open the address it printed."
    wrong_method = "This server is read-only: use GET or HEAD."

    def __init__(self, app: ASGIApp, *, host: str, token: str = "") -> None:
        """Guard the application `app`, which answers only requests for `host`; `token` may be empty."""
        super().__init__(app, host=host, token=token)
        # All ports of a host share cookies, so the cookie of each server needs another name.
        self._cookie = f"dart-view-{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    def refused(self, status: HTTPStatus, text: str, headers: Mapping[str, str]) -> Response:
        """Return the response to a refused request, as plain text."""
        return PlainTextResponse(text, status, headers)

    def check_token(self, request: Request) -> Response | None:
        """Return None if the request has the token as a cookie; otherwise return a response.

        If the token is in the address, the response stores it as a cookie and redirects to the same address
        without it. If there is no right token, the response is a refusal.
        """
        offered = request.query_params.get("token")
        if offered is None:
            if self.is_right(request.cookies.get(self._cookie, "")):
                return None
        elif self.is_right(offered):
            rest = [pair for pair in parse_qsl(request.url.query) if pair[0] != "token"]
            # A path that begins with two slashes would be the address of another server.
            path = "/" + request.url.path.lstrip("/") + (f"?{urlencode(rest)}" if rest else "")
            response = RedirectResponse(path, HTTPStatus.SEE_OTHER)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return response
        return PlainTextResponse(
            "This page needs the token: open the address that `dart view` printed.",
            HTTPStatus.FORBIDDEN,
        )


# --- one file -------------------------------------------------------------------------------


def write_file(run_dir: Path, path: Path, trajectory: str = "") -> int:
    """Write a page into `path` and return its size in bytes.

    It is the page of `trajectory`, else of the run or the exploration. The file is self-contained: style and
    images are in it. Raises UserError for an unknown trajectory or a file that cannot be written,
    RunDirectoryError if the directory is neither a run nor an exploration.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a directory; name a file in it, e.g. {path / 'run.html'}")
    if is_graph(run_dir):
        if trajectory:
            raise UserError(f"{run_dir} is an exploration, which has no trajectories")
        with read_graph(run_dir) as graph:
            site = File(run_dir, lambda keys: _exported(graph, keys))
            page = site.render("graph.html", graph_pages.whole(graph, site))
    else:
        with open_reader(run_dir) as reader:
            site = File(run_dir, reader.screenshots)
            if trajectory:
                values = run_pages.trajectory(reader, site, Query(), trajectory)
                page = site.render("trajectory.html", values)
            else:
                page = site.render("run.html", run_pages.run(reader, site, Query()))
    content, partial = page.encode(), path.with_name(f"{path.name}.tmp")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return len(content)


def _exported(graph: GraphReader, keys: Iterable[str]) -> dict[str, bytes]:
    """Return screenshots of an exploration by key, small enough for an exported file."""
    return {key: reduced(graph.screenshot(key), EXPORTED) for key in keys}
