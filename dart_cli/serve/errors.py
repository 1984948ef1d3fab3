"""Errors of the endpoint, as OpenAI's clients read them.

ApiError      one answer: status, code, text with the cure, and whether to ask again
as_api_error  any other error of ours as one
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from bus.errors import DartError, OversizeError, PromptError, UserError

AGAIN_S = 5.0
"""After so long a client may ask again where this process cannot tell better."""


class ApiError(DartError):
    """An answer that is an error."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        text: str,
        *,
        param: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        """`param` names the field; with `retry_after_s` the same request may succeed later."""
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": str(self),
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer. OpenAI's clients repeat 409 and others by themselves unless they are told."""
        if not self.retry_after_s:
            return {"x-should-retry": "false"}
        return {"retry-after": f"{max(1, round(self.retry_after_s))}", "x-should-retry": "true"}


def invalid(text: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error of a request that is wrong, and stays so."""
    return ApiError(HTTPStatus.BAD_REQUEST, code, text, param=param)


def unavailable(text: str, code: str = "unavailable") -> ApiError:
    """Return the error of a request that the run cannot answer now."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, code, text, retry_after_s=AGAIN_S)


def as_api_error(error: DartError) -> ApiError:
    """Return what a client is told of an error of ours."""
    match error:
        case ApiError():
            return error
        case PromptError():
            return invalid(str(error), "messages", "invalid_prompt")
        case OversizeError():
            return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_large", str(error))
        case UserError():
            return invalid(str(error))
    return unavailable(str(error))


def _type_of(status: HTTPStatus) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return "authentication_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
