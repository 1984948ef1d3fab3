"""Requests: their JSON read and checked, their images decoded.

read_json   the object of a body
read_body   its fields as a model: Opening of a session, End of one
read_chat   the body of POST /v1/chat/completions -> ChatRequest

Nothing of it is trusted: any JSON gives a request or an ApiError that names the field.
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
_SHOWN = 40  # characters of a wrong value in an error

_REASON_CHARS = 4000


@dataclass(frozen=True)
class ChatRequest:
    """What an agent asks for."""

    fields: Mapping[str, Any]  # all, as they came
    messages: list[ChatMessage]
    images: list[bytes]  # [I >= 1], encoded, in reading order
    model: str
    streamed: bool
    usage_streamed: bool  # a chunk of its own for the usage, at the end of the stream
    logprobs: bool
    token_ids: bool  # vLLM's fields with the tokens of prompt and completion
    digest: bytes  # of the body: a repeated request has the same


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; an empty body is an empty object. Raises ApiError."""
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
    """What a request says of the session that it opens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: str = ""  # empty: what data's scheduler chooses
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train: bool = True
    session: str = ""  # an id of the agent's own


class End(BaseModel):
    """What a request says of the end of its session."""

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
        """In our terms: a reward alone passes where it is 1. Raises ApiError."""
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
        """The last screenshot; None where there is none. Raises ApiError."""
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
    def _as_parts(cls, given: Any) -> Any:
        return [{"type": "text", "text": given}] if isinstance(given, str) else given


class _Body(BaseModel):
    """A chat request; its settings are read by settle (sampling.py)."""

    messages: list[_Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    model: str
    stream: StrictBool | None = None
    stream_options: Any = None
    logprobs: StrictBool | None = None
    return_token_ids: StrictBool | None = None


M = TypeVar("M", bound=BaseModel)


def read_body(model: type[M], fields: Mapping[str, Any]) -> M:
    """Return the fields of a body, checked. Raises ApiError that names the first wrong one."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])[1:]
        said = (
            first["msg"].replace("Field required", "is missing").replace("Input should", "must", 1)
        )
        said = said if said.startswith(("must", "is ")) else f": {said}"
        raise invalid(f"{where} {said}".replace(" :", ":"), where) from None


def read_chat(body: bytes) -> ChatRequest:
    """Return a chat request. Raises ApiError."""
    fields = read_json(body)
    told = read_body(_Body, fields)
    images: list[bytes] = []
    messages = [
        _message(each, f"messages[{index}]", images) for index, each in enumerate(told.messages)
    ]
    if messages[-1].role != "user":
        text = "the last of messages must be the user's: the completion is the answer to it"
        raise invalid(text, "messages")
    if sum(len(each.parts) for each in messages) > MOST_PARTS or len(images) > MOST_IMAGES:
        text = f"messages have more than {MOST_PARTS:,} parts or {MOST_IMAGES:,} images"
        raise invalid(text, "messages")
    if not images:
        raise invalid(
            "messages show no image: each prompt needs the screenshot that it asks about, as image_url "
            "with a data URL (docs/serve.md)",
            "messages",
        )
    streaming = told.stream_options
    return ChatRequest(
        fields=fields,
        messages=messages,
        images=images,
        model=_text(told.model, "model"),
        streamed=bool(told.stream),
        usage_streamed=isinstance(streaming, dict) and streaming.get("include_usage") is True,
        logprobs=bool(told.logprobs),
        token_ids=bool(told.return_token_ids),
        digest=hashlib.blake2b(body, digest_size=16).digest(),
    )


def _message(told: _Message, where: str, images: list[bytes]) -> ChatMessage:
    """One message; its images are added to `images`."""
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(told, name):
            raise invalid(
                f"{where}.{name} is not supported: write the call as the model did, in content",
                f"{where}.{name}",
            )
    content = told.content
    if content is None:
        if told.role != "assistant":
            text = f"{where}.content must be a string or a list of parts"
            raise invalid(text, f"{where}.content")
        content = [{"type": "text", "text": ""}]
    parts = [_part(each, f"{where}.content[{at}]", images) for at, each in enumerate(content)]
    if told.role != "user" and any(part.is_image for part in parts):
        text = f"{where}.content: only messages of the user may have images"
        raise invalid(text, f"{where}.content")
    return ChatMessage(role="system" if told.role == "developer" else told.role, parts=parts)


def _part(given: Mapping[str, Any], where: str, images: list[bytes]) -> ChatPart:
    kind = given.get("type")
    if kind == "text":
        return ChatPart(text=_text(given.get("text"), f"{where}.text"))
    if kind == "image_url":
        url = given.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        images.append(_image(_text(url, f"{where}.image_url"), f"{where}.image_url"))
        return ChatPart(is_image=True)
    raise invalid(f"{where} must be of type text or image_url, got {kind!r:.40}", where)


def _image(url: str, where: str) -> bytes:
    """Return the encoded image of a data URL."""
    head, comma, payload = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise invalid(
            f"{where} must be a data URL, data:image/png;base64,..., got {url[:_SHOWN]!r}; nothing is "
            "fetched from elsewhere",
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
    """Return a string without lone surrogates, which JSON can spell: they are in no message of ours."""
    if not isinstance(value, str):
        raise invalid(f"{where} must be a string, got {type(value).__name__}", where)
    return value.encode(errors="replace").decode()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
