"""A client of models behind the OpenAI chat API.

ChatServer     a model at an address, and how long an answer may take; `ask` sends a request
ChatReply      the text of an answer, and the tokens that it cost
chat_server    checks a user's settings and makes a ChatServer
image_part     returns a screenshot as a part of a message
without_fence  returns an answer without the fence of a code block

The key is read from an environment variable and is sent only in the Authorization header: it is in no file,
log or error. Redirects are refused, since the header would follow them.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from bus.errors import EngineError, UserError, first_line

MOST_BYTES = 2**20  # of an answer
MOST_TOKENS = 2048  # of a completion, thoughts included
MOST_FAILED = 10  # requests in a row without an answer
KEY = "OPENAI_API_KEY"
"""Environment variable with the key, unless the user names another one."""


@dataclass(frozen=True)
class SettingNames:
    """The names of the options or keys that set up a server, for error messages."""

    url: str = "--url"
    model: str = "--model"
    key_variable: str = "--key-env"


@dataclass(frozen=True)
class ChatReply:
    """An answer of a model."""

    text: str
    prompt_tokens: int = 0  # as the server counts them; 0 if it does not
    completion_tokens: int = 0


@dataclass(frozen=True)
class ChatServer:
    """A model behind the OpenAI chat API."""

    url: str  # up to and with the version, e.g. http://localhost:8000/v1
    model: str
    answer_s: float = 60.0  # longest time of a request
    key: str = field(default="", repr=False)  # empty: no Authorization header
    names: SettingNames = SettingNames()

    def ask(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int = MOST_TOKENS
    ) -> ChatReply:
        """Send a request and return the answer; this blocks.

        Raises UserError if another request would fail as well, else EngineError.
        """
        body = {"model": self.model, "messages": messages, "max_completion_tokens": max_tokens}
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(  # noqa: S310 - the scheme is checked by chat_server
            f"{self.url}/chat/completions", json.dumps(body).encode(), headers
        )
        try:
            with _OPENER.open(request, timeout=self.answer_s) as reply:
                answer = reply.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from None
        except (OSError, ValueError, HTTPException) as error:
            raise EngineError(f"{self.url}: {type(error).__name__}: {first_line(error)}") from None
        return _reply(answer)

    def _refused(self, error: urllib.error.HTTPError) -> UserError | EngineError:
        detail = first_line(Exception(error.read(2000).decode(errors="replace")))
        text = f"{self.url} answers {error.code} {error.reason}: {detail}"
        if self.key:
            text = text.replace(self.key, "(key)")
        if error.code in (401, 403):
            return UserError(
                f"{text}; check the key in the variable that {self.names.key_variable} names"
            )
        if error.code in (301, 302, 303, 307, 308, 404):
            names = self.names
            return UserError(
                f"{text}; check {names.url}, which ends with the version, and {names.model}"
            )
        return EngineError(text)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect: the answer becomes an error, and the key is sent to no other host."""


_OPENER = urllib.request.build_opener(_NoRedirects)


def chat_server(
    url: str,
    model: str,
    *,
    key_variable: str = "",
    answer_s: float = 60.0,
    names: SettingNames = SettingNames(),
) -> ChatServer:
    """Check the settings and return a server, without a request to it. Raises UserError.

    The key is read from the environment variable `key_variable`, or if that is "", from KEY if it is set.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{names.url} {url!r}: want a base URL such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UserError(
            f"{names.url}: no user, key or query belongs into it; the key is read from {names.key_variable}"
        )
    if not model:
        raise UserError(f"{names.url} needs {names.model} NAME, as the server calls it")
    key = os.environ.get(key_variable or KEY, "").strip()
    if key_variable and not key:
        raise UserError(f"{names.key_variable} {key_variable}: no such variable, or it is empty")
    if not key.isascii() or not key.isprintable():
        raise UserError(
            f"the variable {key_variable or KEY} does not hold a key: not all of it is printable ASCII"
        )
    return ChatServer(url.rstrip("/"), model, answer_s, key, names)


def image_part(image: bytes, media_type: str = "image/png") -> dict[str, Any]:
    """Return an encoded image as a part of a message."""
    url = f"data:{media_type};base64,{base64.b64encode(image).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def without_fence(text: str) -> str:
    """Return an answer without the fence of a code block around it, which chat models often add."""
    bare = text.strip()
    if bare.startswith("```") and bare.endswith("```") and len(bare) >= 6:
        bare = bare[3:-3].removeprefix("json").strip()
    return bare


def _reply(answer: bytes) -> ChatReply:
    """Return the reply in a server's answer. Raises EngineError if it has no text."""
    if len(answer) > MOST_BYTES:
        raise EngineError(f"the server's answer is longer than {MOST_BYTES} bytes")
    try:
        message = json.loads(answer)
        content = message["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise EngineError("the server's answer has no choices[0].message.content")
    usage = message.get("usage")
    counted = usage if isinstance(usage, dict) else {}
    return ChatReply(
        content, _tokens(counted, "prompt_tokens"), _tokens(counted, "completion_tokens")
    )


def _tokens(usage: Mapping[str, Any], name: str) -> int:
    count = usage.get(name)
    return count if type(count) is int and count > 0 else 0
