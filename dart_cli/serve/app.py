"""The routes of the endpoint.

    POST   /v1/chat/completions              a completion, in the session that the request names
    POST   /v1/sessions/ID/chat/completions  the same where a client can only be given a base URL
    GET    /v1/models, /v1/models/NAME       the one model
    POST   /v1/sessions                      open a session: an episode of a task
    GET    /v1/sessions, /v1/sessions/ID     the open sessions, or one of them
    POST   /v1/sessions/ID/end               submit the verdict
    DELETE /v1/sessions/ID                   give the episode up

make_app    makes the ASGI application
ServeGuard  refuses requests under another host name, without the token, or from a web page

A page of another site can send a POST to loopback without reading the answer. Browsers add an Origin header
to it, which no agent sends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from bus.errors import DartError
from dart_cli.runtime.http_server import HttpGuard
from dart_cli.serve.errors import ApiError, as_api_error, invalid
from dart_cli.serve.replies import (
    MODEL,
    as_events,
    completion_json,
    model_json,
    models_json,
    session_json,
)
from dart_cli.serve.requests import End, Opening, read_body, read_chat, read_json
from dart_cli.serve.sessions import Sessions


class ServeGuard(HttpGuard):
    """A guard that passes a request on to the endpoint or refuses it. The token is the API key."""

    methods = ("GET", "POST", "DELETE")
    headers = {"x-content-type-options": "nosniff"}  # noqa: RUF012 - a constant
    wrong_host = "This server answers only under its own name: use the address that it printed."
    wrong_method = "Use GET, POST or DELETE."

    def refused(self, status: HTTPStatus, text: str, headers: Mapping[str, str]) -> Response:
        """See HttpGuard."""
        error = ApiError(status, "refused", text)
        return JSONResponse(error.body, status, {**error.headers, **headers})

    def check_origin(self, request: Request) -> Response | None:
        """See HttpGuard."""
        if "origin" not in request.headers:
            return None
        text = "Pages of the web may not use this server; ask from a program."
        return self.refused(HTTPStatus.FORBIDDEN, text, {})

    def check_token(self, request: Request) -> Response | None:
        """See HttpGuard."""
        scheme, _, offered = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_right(offered.strip()):
            return None
        text = "Wrong API key: send the token that `dart serve` printed as `Authorization: Bearer TOKEN`."
        return self.refused(HTTPStatus.UNAUTHORIZED, text, {"www-authenticate": "Bearer"})


logger = logging.getLogger(__name__)

BODY_S = 60.0
"""Seconds that a body may take to arrive."""
_SMALL = 64 * 1024  # bytes of a body that is parsed in the event loop's thread
_SESSION, _TASK, _SEED, _TRAIN = (f"x-dart-{name}" for name in ("session", "task", "seed", "train"))

NO_SESSION = (
    "which episode is it? Name the session: by the header x-dart-session, by the field user, "
    "session_id or metadata.session, or by the base URL, /v1/sessions/ID (docs/serve.md)"
)

Handler = Callable[[Request], Awaitable[Response]]


BODY_BYTES = 64 * 2**20
"""Most bytes of a request's body. Screenshots as base64 take a third more than as files."""


def make_app(sessions: Sessions, *, host: str, token: str, body_bytes: int = BODY_BYTES) -> ASGIApp:
    """Return the ASGI application for these sessions. It answers only under the name `host`."""

    async def complete(request: Request) -> Response:
        body = await _body(request, body_bytes)
        # 1. Read the request and the session that it names.
        is_small = len(body) < _SMALL
        chat = read_chat(body) if is_small else await asyncio.to_thread(read_chat, body)
        name, opening = _session_of(
            request, chat.fields, chat.model, of_user=not sessions.are_alone
        )
        if not name and not sessions.are_alone:
            raise invalid(NO_SESSION, "user", "no_session")
        # 2. Check its settings before a task is leased for it, then take or open the session.
        sessions.check(name, opening, chat)
        session = await (sessions.obtain(name, opening) if name else sessions.open(opening))
        # 3. Ask for the completion. OpenAI's clients count their repeats in this header.
        is_repeat = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        try:
            answer = await session.ask(chat, is_repeat=is_repeat)
        finally:
            if not name:
                session.close("its one request is over")
        # 4. Answer, as one object or as a stream.
        reply = completion_json(session, chat, answer, sessions.action_language)
        if chat.streamed:
            events = as_events(reply, with_usage=chat.usage_streamed)
            return Response(events, media_type="text/event-stream")
        return JSONResponse(reply)

    async def open_session(request: Request) -> Response:
        opening = read_body(Opening, read_json(await _body(request, _SMALL)))
        name = opening.session
        if name and name in {session.terms.id for session in sessions.all()}:
            raise invalid(f"session {name} is open already", "session")
        session = await (sessions.obtain(name, opening) if name else sessions.open(opening))
        return JSONResponse(session_json(session), HTTPStatus.CREATED)

    async def list_sessions(_request: Request) -> Response:
        rows = [session_json(session) for session in sessions.all()]
        return JSONResponse({"object": "list", "data": rows})

    async def show_session(request: Request) -> Response:
        return JSONResponse(session_json(sessions.get(request.path_params["name"])))

    async def end_session(request: Request) -> Response:
        end = read_body(End, read_json(await _body(request, body_bytes)))
        verdict, image = end.verdict, end.image
        session = sessions.to_end(request.path_params["name"], verdict)
        is_first = session.verdict is None
        try:
            ack = await session.end(verdict, end.stop_reason, image)
        finally:
            if is_first and session.verdict is not None:
                sessions.count(verdict.outcome)
        result = {
            "outcome": verdict.outcome,
            "reward": verdict.reward,
            "accepted": ack.accepted,
            "note": ack.note,
        }
        return JSONResponse({**session_json(session), **result})

    async def delete_session(request: Request) -> Response:
        session = sessions.get(request.path_params["name"])
        await session.give_back("the agent gave the episode up")
        return JSONResponse({**session_json(session), "deleted": True})

    async def models(_request: Request) -> Response:
        return JSONResponse(models_json(sessions.action_language))

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name.partition(":")[0] != MODEL:
            raise ApiError(
                HTTPStatus.NOT_FOUND, "model_not_found", f"no model {name!r}: use {MODEL}"
            )
        return JSONResponse({**model_json(sessions.action_language), "id": name})

    def route(path: str, handler: Handler, *methods: str) -> Route:
        return Route(path, _answering(handler, sessions), methods=list(methods))

    one = "/v1/sessions/{name}"
    routes = [
        route("/v1/chat/completions", complete, "POST"),
        route("/v1/models", models, "GET"),
        route("/v1/models/{name:path}", model, "GET"),
        route("/v1/sessions", open_session, "POST"),
        route("/v1/sessions", list_sessions, "GET"),
        route(one, show_session, "GET"),
        route(one, delete_session, "DELETE"),
        route(f"{one}/end", end_session, "POST"),
        route(f"{one}/chat/completions", complete, "POST"),
        route(f"{one}/models", models, "GET"),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})
    return ServeGuard(app, host=host, token=token)


def _answering(handler: Handler, sessions: Sessions) -> Handler:
    """Return a handler that answers with an error object where the given one raises."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # no client reads this answer
        except DartError as raised:
            error = as_api_error(raised)
        except Exception:
            logger.exception("a request to %s broke", request.url.path)
            text = "dart serve broke on this request; its log has the traceback"
            error = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", text)
        sessions.refused += 1
        logger.info("%s: %d %s", request.url.path, error.status, error)
        return JSONResponse(error.body, error.status, error.headers)

    return answer


def _not_found(request: Request, raised: Exception) -> Response:
    """Return the answer to a request for a path or method that does not exist."""
    status = HTTPStatus(getattr(raised, "status_code", HTTPStatus.NOT_FOUND))
    text = (
        f"{request.method} {request.url.path}: there is no such thing; the endpoint is "
        "/v1/chat/completions, sessions are under /v1/sessions (docs/serve.md)"
    )
    error = ApiError(status, "not_found", text)
    return JSONResponse(error.body, status, error.headers)


async def _body(request: Request, most: int) -> bytes:
    """Return the body of a request. Raises ApiError if it is not JSON, too slow, or has over `most` bytes."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() not in (
        "application/json",
        "",
    ):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "not_json",
            "send JSON, with the header content-type: application/json",
        )
    too_large = ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "too_large",
        f"a body may have {most / 2**20:g} MiB: show fewer or smaller images in it",
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT, "slow", f"the body did not arrive within {BODY_S:g} s"
        ) from None
    return b"".join(parts)


def _session_of(
    request: Request, fields: Mapping[str, Any], model: str, *, of_user: bool
) -> tuple[str, Opening]:
    """Return (name, opening): the session that a chat request names, or "", and the settings to open it.

    With `of_user`, the name of the user and the session id of a router also name a session. Raises ApiError.
    """
    metadata = fields.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}

    def setting(header: str, key: str) -> str:
        value = request.headers.get(header) or metadata.get(key) or ""
        return value if isinstance(value, str) else str(value)

    user = fields.get("user")
    of_router = fields.get("session_id") or request.headers.get("x-session-id")  # litellm, Harbor
    name = request.path_params.get("name") or setting(_SESSION, "session")
    if of_user and not name:
        name = next((text for text in (of_router, user) if isinstance(text, str)), "")
    base, _, of_model = model.partition(":")
    if base != MODEL:
        of_model = ""  # many harnesses have their own names of models
    seed, train = setting(_SEED, "seed"), setting(_TRAIN, "train").lower()
    fields = {
        "task": setting(_TASK, "task") or of_model,
        "seed": int(seed) if seed.isdecimal() and len(seed) <= 20 else seed or None,
        "train": {"true": True, "": True, "false": False}.get(train, train),
    }
    return name, read_body(Opening, fields)
