"""Reads and checks the JSON of requests, and decodes their images.

read_json   returns the JSON object of a body
read_body   returns the fields of a body as a pydantic model: Opening or End of a session
read_chat   returns the body of POST /v1/chat/completions as a ChatRequest

Requests are not trusted: any JSON gives a request or an ApiError that names the field.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, field_validator

from bus.messages import ChatMessage, ChatPart, Outcome
from dart_cli.serve.errors import invalid
from envs.contract.base import Verdict
from envs.contract.blobs import image_type

MOST_MESSAGES = 4096
MOST_PARTS = 16_384
MOST_IMAGES = 1024
_MOST_SHOWN = 40  # characters of a wrong value in an error

_REASON_CHARS = 4000


@dataclass(frozen=True)
class ChatRequest:
    """A request for a completion."""

    fields: Mapping[str, Any]  # all fields of the body, unchanged
    messages: list[ChatMessage]
    images: list[bytes]  # [I >= 1], encoded, in reading order
    model: str
    streamed: bool
    usage_streamed: bool  # whether the stream ends with a separate chunk for the usage
    logprobs: bool
    token_ids: bool  # vLLM's fields with the tokens of prompt and completion
    digest: bytes  # of the body: a repeated request has the same


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, {} for an empty body. Raises ApiError."""
    if not body.strip():
        return {}
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # a body that is not UTF-8 is a ValueError, too
        raise invalid(f"the body is no JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return value


class Opening(BaseModel):
    """The settings of a session that a request opens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: str = ""  # empty: the data service's scheduler chooses
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train: bool = True
    session: str = ""  # the session's id, if the agent chooses it


class End(BaseModel):
    """The end of a session, as a request describes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reward: Annotated[float, Field(ge=0, le=1)] | None = None
    outcome: Outcome | None = None
    reason: str = ""
    stop_reason: (
        Literal["done", "gave_up", "step_limit", "malformed", "broken", "environment"] | None
    ) = None
    screenshot: str | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict. A reward without an outcome is a pass if it is 1. Raises ApiError."""
        reason = self.reason[:_REASON_CHARS]
        if self.outcome is None and self.reward is None:
            raise invalid(
                'an end needs a reward from 0 to 1, or an outcome: "pass", "fail", "invalid"'
            )
        if self.outcome is None:
            return Verdict.scored(self.reward or 0.0, reason)
        if self.outcome == "invalid" and self.reward is not None:
            raise invalid("an invalid episode has no reward", "reward")
        return Verdict(self.outcome, reason, self.reward)

    @property
    def image(self) -> bytes | None:
        """The last screenshot, None if the request has none. Raises ApiError."""
        return None if self.screenshot is None else _image(self.screenshot, "screenshot")


class _Message(BaseModel):
    """One of `messages`; its content is read part by part."""

    role: Literal["system", "developer", "user", "assistant"]
    content: list[dict[str, Any]] | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Body(BaseModel):
    """The fields of a chat request, except its sampling settings, which `settle` reads (sampling.py)."""

    messages: list[_Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    model: str
    stream: StrictBool | None = None
    stream_options: Any = None
    logprobs: StrictBool | None = None
    return_token_ids: StrictBool | None = None


M = TypeVar("M", bound=BaseModel)


def read_body(model: type[M], fields: Mapping[str, Any]) -> M:
    """Return the fields of a body as an instance of `model`. Raises ApiError for the first wrong field."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])[1:]
        problem = first["msg"].replace("Field required", "is missing")
        problem = problem.replace("Input should", "must", 1)
        problem = problem if problem.startswith(("must", "is ")) else f": {problem}"
        raise invalid(f"{where} {problem}".replace(" :", ":"), where) from None


def read_chat(body: bytes) -> ChatRequest:
    """Return the chat request in a body. Raises ApiError for the first mistake in it."""
    fields = read_json(body)
    checked = read_body(_Body, fields)
    images: list[bytes] = []
    messages = [
        _message(message, f"messages[{index}]", images)
        for index, message in enumerate(checked.messages)
    ]
    if messages[-1].role != "user":
        text = "the last of messages must be the user's: the completion is the answer to it"
        raise invalid(text, "messages")
    part_count = sum(len(message.parts) for message in messages)
    if part_count > MOST_PARTS or len(images) > MOST_IMAGES:
        text = f"messages have more than {MOST_PARTS:,} parts or {MOST_IMAGES:,} images"
        raise invalid(text, "messages")
    if not images:
        raise invalid(
            "messages show no image: each prompt needs the screenshot that it asks about, as image_url "
            "with a data URL (docs/serve.md)",
            "messages",
        )
    streaming = checked.stream_options
    return ChatRequest(
        fields=fields,
        messages=messages,
        images=images,
        model=_text(checked.model, "model"),
        streamed=bool(checked.stream),
        usage_streamed=isinstance(streaming, dict) and streaming.get("include_usage") is True,
        logprobs=bool(checked.logprobs),
        token_ids=bool(checked.return_token_ids),
        digest=hashlib.blake2b(body, digest_size=16).digest(),
    )


def _message(message: _Message, where: str, images: list[bytes]) -> ChatMessage:
    """Return a message for the bus, and append its images to `images`. `where` names it in errors."""
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise invalid(
                f"{where}.{name} is not supported: write the call as the model did, in content",
                f"{where}.{name}",
            )
    content = message.content
    if content is None:
        if message.role != "assistant":
            text = f"{where}.content must be a string or a list of parts"
            raise invalid(text, f"{where}.content")
        content = [{"type": "text", "text": ""}]
    parts = [_part(part, f"{where}.content[{at}]", images) for at, part in enumerate(content)]
    if message.role != "user" and any(part.is_image for part in parts):
        text = f"{where}.content: only messages of the user may have images"
        raise invalid(text, f"{where}.content")
    role = "system" if message.role == "developer" else message.role
    return ChatMessage(role=role, parts=parts)


def _part(part: Mapping[str, Any], where: str, images: list[bytes]) -> ChatPart:
    kind = part.get("type")
    if kind == "text":
        return ChatPart(text=_text(part.get("text"), f"{where}.text"))
    if kind == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        images.append(_image(_text(url, f"{where}.image_url"), f"{where}.image_url"))
        return ChatPart(is_image=True)
    raise invalid(f"{where} must be of type text or image_url, got {kind!r:.40}", where)


def _image(url: str, where: str) -> bytes:
    """Return the encoded image in a data URL. Raises ApiError."""
    head, comma, payload = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise invalid(
            f"{where} must be a data URL, data:image/png;base64,..., got {url[:_MOST_SHOWN]!r}; images "
            "of other URLs are not fetched",
            where,
        )
    try:
        image = base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError):
        raise invalid(f"{where} is no base64", where) from None
    if image_type(image) is None:
        raise invalid(
            f"{where}: {len(image)} bytes that are no PNG, JPEG or WebP; encode it as one of them",
            where,
        )
    return image


def _text(value: object, where: str) -> str:
    """Return a string without lone surrogates, which JSON can hold and our messages cannot.

    Raises ApiError.
    """
    if not isinstance(value, str):
        raise invalid(f"{where} must be a string, got {type(value).__name__}", where)
    return value.encode(errors="replace").decode()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
