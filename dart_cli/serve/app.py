"""The addresses of the endpoint.

    POST   /v1/chat/completions              a completion, in the session that the request names
    POST   /v1/sessions/ID/chat/completions  the same where a client can only be given a base URL
    GET    /v1/models
    POST   /v1/sessions                      open a session: an episode of a task
    GET    /v1/sessions, /v1/sessions/ID     what is open
    POST   /v1/sessions/ID/end               the verdict
    DELETE /v1/sessions/ID                   give the episode up

make_app   the ASGI application
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from bus.errors import DartError
from bus.messages import Outcome, StopReason
from dart_cli.serve.errors import ApiError, as_api_error, invalid
from dart_cli.serve.guard import ServeGuard
from dart_cli.serve.replies import (
    MODEL,
    as_events,
    completion_json,
    model_json,
    models_json,
    session_json,
)
from dart_cli.serve.requests import read_chat, read_final_image, read_json
from dart_cli.serve.sessions import Opening, Sessions
from envs.base import Verdict

logger = logging.getLogger(__name__)

BODY_S = 60.0
"""Longest time that a body may take to arrive."""
_SMALL = 64 * 1024  # bytes of a body that is read where the event loop runs
_MOST_SEED = 2**63
_SESSION, _TASK, _SEED, _TRAIN = (f"x-dart-{name}" for name in ("session", "task", "seed", "train"))
_STOPS: tuple[StopReason, ...] = (
    "done",
    "gave_up",
    "step_limit",
    "malformed",
    "broken",
    "environment",
)
_REASON_CHARS = 4000

Handler = Callable[[Request], Awaitable[Response]]


BODY_BYTES = 64 * 2**20
"""Of a request; screenshots as base64 take a third more than as files."""


def make_app(sessions: Sessions, *, host: str, token: str, body_bytes: int = BODY_BYTES) -> ASGIApp:
    """The endpoint over these sessions; it answers only under the name `host`."""

    async def chat(request: Request) -> Response:
        body = await _body(request, body_bytes)
        asked = read_chat(body) if len(body) < _SMALL else await asyncio.to_thread(read_chat, body)
        name, opening = _session_of(request, asked.fields, asked.model)
        sessions.check(name, opening, asked)
        session = await sessions.obtain(name, opening)
        is_repeat = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        answer = await session.ask(asked, is_repeat=is_repeat)
        told = completion_json(session, asked, answer)
        if asked.streamed:
            events = as_events(told, with_usage=asked.usage_streamed)
            return Response(events, media_type="text/event-stream")
        return JSONResponse(told)

    async def opened(request: Request) -> Response:
        fields = read_json(await _body(request, _SMALL))
        known = {"task", "seed", "train", "session"}
        if unknown := sorted(fields.keys() - known):
            raise invalid(
                f"{unknown[0]} is not known here: a session has {', '.join(sorted(known))}",
                unknown[0],
            )
        task, name = fields.get("task"), fields.get("session")
        for key, value in (("task", task), ("session", name)):
            if value is not None and not isinstance(value, str):
                raise invalid(f"{key} must be a string", key)
        if name and name in {each.terms.id for each in sessions.all()}:
            raise invalid(f"session {name} is open already", "session")
        opening = Opening(task or "", _seed(fields.get("seed")), _trained(fields.get("train")))
        session = await (sessions.obtain(name, opening) if name else sessions.open(opening))
        return JSONResponse(session_json(session), HTTPStatus.CREATED)

    async def listed(_request: Request) -> Response:
        found = [session_json(each) for each in sessions.all()]
        return JSONResponse({"object": "list", "data": found})

    async def shown(request: Request) -> Response:
        return JSONResponse(session_json(sessions.get(request.path_params["name"])))

    async def ended(request: Request) -> Response:
        fields = read_json(await _body(request, body_bytes))
        verdict, stop_reason, image = _verdict_of(fields, sessions)
        session = sessions.to_end(request.path_params["name"], verdict)
        is_first = session.verdict is None
        try:
            ack = await session.end(verdict, stop_reason, image)
        finally:
            if is_first and session.verdict is not None:
                sessions.count(verdict.outcome)
        told = {
            "outcome": verdict.outcome,
            "reward": verdict.reward,
            "accepted": ack.accepted,
            "note": ack.note,
        }
        return JSONResponse({**session_json(session), **told})

    async def given_up(request: Request) -> Response:
        session = sessions.get(request.path_params["name"])
        await session.give_back("the agent gave the episode up")
        return JSONResponse({**session_json(session), "deleted": True})

    async def models(_request: Request) -> Response:
        return JSONResponse(models_json())

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name.partition(":")[0] != MODEL:
            raise ApiError(
                HTTPStatus.NOT_FOUND, "model_not_found", f"no model {name!r}: use {MODEL}"
            )
        return JSONResponse({**model_json(), "id": name})

    def route(path: str, handler: Handler, *methods: str) -> Route:
        return Route(path, _answering(handler, sessions), methods=list(methods))

    one = "/v1/sessions/{name}"
    routes = [
        route("/v1/chat/completions", chat, "POST"),
        route("/v1/models", models, "GET"),
        route("/v1/models/{name:path}", model, "GET"),
        route("/v1/sessions", opened, "POST"),
        route("/v1/sessions", listed, "GET"),
        route(one, shown, "GET"),
        route(one, given_up, "DELETE"),
        route(f"{one}/end", ended, "POST"),
        route(f"{one}/chat/completions", chat, "POST"),
        route(f"{one}/models", models, "GET"),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})
    return ServeGuard(app, host=host, token=token)


def _answering(handler: Handler, sessions: Sessions) -> Handler:
    """The handler, whose errors are answers."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
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
    status = HTTPStatus(getattr(raised, "status_code", HTTPStatus.NOT_FOUND))
    text = (
        f"{request.method} {request.url.path}: there is no such thing; the endpoint is "
        "/v1/chat/completions, sessions are under /v1/sessions (docs/serve.md)"
    )
    error = ApiError(status, "not_found", text)
    return JSONResponse(error.body, status, error.headers)


async def _body(request: Request, most: int) -> bytes:
    """The body, of at most so many bytes, which comes in time. Raises ApiError."""
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


def _session_of(request: Request, fields: Mapping[str, Any], model: str) -> tuple[str, Opening]:
    """The session that a chat request names, and what it says of it, where it opens it."""
    told = fields.get("metadata")
    metadata = told if isinstance(told, dict) else {}

    def named(header: str, key: str) -> str:
        found = request.headers.get(header) or metadata.get(key) or ""
        return found if isinstance(found, str) else str(found)

    user = fields.get("user")
    of_router = fields.get("session_id") or request.headers.get("x-session-id")  # litellm, Harbor
    name = request.path_params.get("name") or named(_SESSION, "session")
    name = name or next((each for each in (of_router, user) if isinstance(each, str)), "")
    if not name:
        raise invalid(
            "which episode is it? Name the session: by the header x-dart-session, by the field user, "
            "session_id or metadata.session, or by the base URL, /v1/sessions/ID (docs/serve.md)",
            "user",
            "no_session",
        )
    base, _, of_model = model.partition(":")
    if base != MODEL:
        of_model = ""  # harnesses often know models by names of their own
    seed = named(_SEED, "seed")
    if seed and not seed.isdecimal():
        raise invalid("seed must be a whole number", "seed")
    train = named(_TRAIN, "train").lower()
    if train not in ("", "true", "false"):
        raise invalid("train must be true or false", "train")
    opening = Opening(
        named(_TASK, "task") or of_model, _seed(int(seed[:20]) if seed else None), train != "false"
    )
    return name, opening


def _seed(value: object) -> int | None:
    if value is not None and not (type(value) is int and 0 <= value < _MOST_SEED):
        raise invalid("seed must be a whole number from 0 on", "seed")
    return value


def _trained(value: object) -> bool:
    if value not in (None, True, False) or type(value) is int:
        raise invalid("train must be true or false", "train")
    return value is not False


def _verdict_of(
    fields: Mapping[str, Any], sessions: Sessions
) -> tuple[Verdict, StopReason | None, bytes | None]:
    """What the body of an end says."""
    known = ("reward", "outcome", "reason", "stop_reason", "screenshot")
    if unknown := sorted(fields.keys() - set(known)):
        raise invalid(f"{unknown[0]} is not known here: an end has {', '.join(known)}", unknown[0])
    reward, outcome, stop = fields.get("reward"), fields.get("outcome"), fields.get("stop_reason")
    reason = fields.get("reason", "")
    if outcome is not None and outcome not in get_args(Outcome):
        raise invalid("outcome must be pass, fail or invalid", "outcome")
    if reward is not None and not (
        type(reward) in (int, float) and math.isfinite(reward) and 0 <= reward <= 1
    ):
        raise invalid("reward must be a number from 0 to 1", "reward")
    if reward is None and outcome is None:
        raise invalid('an end needs a reward from 0 to 1, or an outcome: "pass", "fail", "invalid"')
    if reward is not None and outcome == "invalid":
        raise invalid("an invalid episode has no reward", "reward")
    if stop is not None and stop not in _STOPS:
        raise invalid(f"stop_reason must be one of {', '.join(_STOPS)}", "stop_reason")
    if not isinstance(reason, str):
        raise invalid("reason must be a string", "reason")
    verdict = sessions.verdict(
        None if reward is None else float(reward), outcome, reason[:_REASON_CHARS]
    )
    return verdict, stop, read_final_image(fields.get("screenshot"))
