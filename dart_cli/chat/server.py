"""A client of models behind the OpenAI chat API.

ChatServer     a model at an address, and how long an answer may take; `ask` sends a request, `probe` checks
               that a server is there
ChatReply      the text of an answer, and the tokens that it cost
Messages       a prompt
Sampled        how an answer is sampled
chat_server    checks a user's settings and makes a ChatServer
without_fence  returns an answer without the fence of a code block

The key is read from an environment variable and is sent only in the Authorization header: it is in no file,
log or error. Redirects are refused, since the header would follow them.
"""

from __future__ import annotations

import base64
import email.utils
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Literal
from urllib.parse import urlsplit

from bus.errors import NoAnswerError, RefusalError, UserError, first_line
from envs.contract.blobs import image_type

Messages = list[tuple[Literal["system", "user", "assistant"], list[str | bytes]]]
"""(role, parts) of each message; a part is a text or an encoded image."""

MOST_BYTES = 2**20  # of an answer
MOST_TOKENS = 2048  # of a completion, thoughts included
MOST_FAILED = 10  # requests in a row without an answer
PROBE_S = 30.0  # longest time of a probe
KEY = "OPENAI_API_KEY"
"""Environment variable with the key, unless the user names another one."""


@dataclass(frozen=True)
class SettingNames:
    """The names of the options or keys that set up a server, for error messages."""

    url: str = "--url"
    model: str = "--model"
    key_variable: str = "--key-env"


@dataclass(frozen=True)
class Sampled:
    """How an answer is sampled. What is None is left to the server."""

    max_tokens: int = MOST_TOKENS
    temperature: float | None = None
    seed: int | None = None
    template: Mapping[str, Any] | None = None  # options of the chat template, as vLLM takes them

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request."""
        fields = {
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "chat_template_kwargs": self.template or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class ChatReply:
    """An answer of a model."""

    text: str
    prompt_tokens: int = 0  # as the server counts them; 0 if it does not
    completion_tokens: int = 0
    thought: str = ""  # that the server took out of the text
    is_cut_off: bool = False  # it has as many tokens as it may have


@dataclass(frozen=True)
class ChatServer:
    """A model behind the OpenAI chat API."""

    url: str  # up to and with the version, e.g. http://localhost:8000/v1
    model: str
    answer_s: float = 60.0  # longest time of a request
    key: str = field(default="", repr=False)  # empty: no Authorization header
    names: SettingNames = SettingNames()

    def ask(self, messages: Messages, sampled: Sampled = Sampled()) -> ChatReply:
        """Send a request and return the answer; this blocks.

        Raises UserError if another request would fail as well, else NoAnswerError.
        """
        chat = [{"role": role, "content": _content(parts)} for role, parts in messages]
        body = {"model": self.model, "messages": chat, **sampled.fields()}
        try:
            return _reply(self._send("chat/completions", body, self.answer_s))
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from None
        except (OSError, ValueError, HTTPException) as error:
            raise NoAnswerError(f"{self.url}: {_cause(error)}") from None

    def probe(self) -> None:
        """Ask for the list of models, to see that a server is there and takes the key; this blocks.

        A server without such a list passes. Raises UserError if nothing answers, the key is refused, or the
        answer is a page.
        """
        try:
            answer = self._send("models", None, min(self.answer_s, PROBE_S))
        except urllib.error.HTTPError as error:
            with error:
                refused = self._refused(error)
            if isinstance(refused, UserError) and error.code != 404:
                raise refused from None
        except (OSError, ValueError, HTTPException) as error:
            raise UserError(
                f"{self.url}: {_cause(error)}; start the server, or check {self.names.url}"
            ) from None
        else:
            if _is_page(answer):
                raise UserError(
                    f"{self.url} answers with a page of HTML; check {self.names.url}, which ends with the version"
                )

    def _send(self, place: str, body: Mapping[str, Any] | None, timeout_s: float) -> bytes:
        """Return the body of the answer to a POST, or to a GET without a body. Raises OSError and others."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(  # noqa: S310 - the scheme is checked by chat_server
            f"{self.url}/{place}", None if body is None else json.dumps(body).encode(), headers
        )
        with _OPENER.open(request, timeout=timeout_s) as reply:
            answer: bytes = reply.read(MOST_BYTES + 1)
        return answer

    def _refused(self, error: urllib.error.HTTPError) -> UserError | NoAnswerError:
        start = error.read(2000)
        page = "a page of HTML"
        detail = page if _is_page(start) else first_line(Exception(start.decode(errors="replace")))
        text = f"{self.url} answers {error.code} {error.reason}: {detail}"
        if self.key:
            text = text.replace(self.key, "(key)")
        if error.code in (401, 402, 403):
            return UserError(
                f"{text}; check the key in the variable that {self.names.key_variable} names"
            )
        if error.code in (301, 302, 303, 307, 308, 404):
            names = self.names
            return UserError(
                f"{text}; check {names.url}, which ends with the version, and {names.model}"
            )
        return NoAnswerError(
            text,
            is_worth_repeating=error.code not in (400, 413, 422),
            after_s=_after_s(error.headers.get("Retry-After")),
        )


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


def without_fence(text: str) -> str:
    """Return an answer without the fence of a code block around it, which chat models often add."""
    bare = text.strip()
    if bare.startswith("```") and bare.endswith("```") and len(bare) >= 6:
        bare = bare[3:-3].removeprefix("json").strip()
    return bare


def _cause(error: Exception) -> str:
    """Return why there was no answer at all."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    cause = reason if isinstance(reason, Exception) else error
    return f"{type(cause).__name__}: {first_line(cause)}"


def _content(parts: Sequence[str | bytes]) -> str | list[dict[str, Any]]:
    """Return the parts of a message as the API takes them."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]  # servers without vision take system messages only in this form
    return [
        {"type": "text", "text": part} if isinstance(part, str) else _image_part(part)
        for part in parts
    ]


def _image_part(image: bytes) -> dict[str, Any]:
    kind = image_type(image) or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(image).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _reply(answer: bytes) -> ChatReply:
    """Return the reply in a server's answer. Raises NoAnswerError if it has no text, RefusalError."""
    if len(answer) > MOST_BYTES:
        raise NoAnswerError(f"the server's answer is longer than {MOST_BYTES} bytes")
    try:
        whole = json.loads(answer)
        choice = whole["choices"][0]
        message = choice["message"]
        content = message["content"]
    except (ValueError, RecursionError, LookupError, TypeError):
        page = ", it is a page of HTML" if _is_page(answer) else ""
        raise NoAnswerError(
            f"the server's answer has no choices[0].message.content{page}"
        ) from None
    usage = whole.get("usage")
    counted = usage if isinstance(usage, dict) else {}
    costs = _count(counted, "prompt_tokens"), _count(counted, "completion_tokens")
    refusal, reason = message.get("refusal"), choice.get("finish_reason")
    if (isinstance(refusal, str) and refusal) or reason == "content_filter":
        why = first_line(Exception(refusal)) if refusal else "its server filters the answer"
        raise RefusalError(f"the model refuses: {why}", *costs)
    thoughts = [message.get(name) for name in ("reasoning_content", "reasoning")]
    thought = next((text for text in thoughts if isinstance(text, str)), "")
    is_cut_off = reason == "length"
    if content is None and is_cut_off:
        content = ""  # the thought has taken all tokens
    if not isinstance(content, str):
        raise NoAnswerError("the server's answer has no choices[0].message.content")
    return ChatReply(content, *costs, thought, is_cut_off)


def _count(usage: Mapping[str, Any], name: str) -> int:
    count = usage.get(name)
    return count if type(count) is int and count > 0 else 0


def _is_page(answer: bytes) -> bool:
    """Return True if an answer is HTML or XML, as proxies and web sites give it."""
    return answer.lstrip()[:1] == b"<"


def _after_s(header: str | None) -> float:
    """Return the seconds that a Retry-After header asks for, as a number or a date; 0 without a valid one."""
    if header is None:
        return 0.0
    try:
        return max(0.0, float(int(header)))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
