"""Errors of the endpoint, in the form that OpenAI's clients read.

ApiError      an answer that is an error: status, code, a text with the fix, and whether the client may retry
invalid       makes the error of a wrong request
unavailable   makes the error of a request that cannot be answered now
as_api_error  turns any DartError into an ApiError
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from bus.errors import DartError, OversizeError, PromptError, UserError

AGAIN_S = 5.0
"""Seconds after which a client may retry, unless this process has a better estimate."""


class ApiError(DartError):
    """An error that the endpoint answers with: its status, code and text."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        text: str,
        *,
        param: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        """Make the error. `param` names the wrong field; with `retry_after_s` > 0 a retry may succeed."""
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON, OpenAI's error object."""
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
        """The answer's headers. Without them OpenAI's clients repeat status 409 and others by themselves."""
        if not self.retry_after_s:
            return {"x-should-retry": "false"}
        return {"retry-after": f"{max(1, round(self.retry_after_s))}", "x-should-retry": "true"}


def invalid(text: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error of a request that is wrong, so that a retry fails as well."""
    return ApiError(HTTPStatus.BAD_REQUEST, code, text, param=param)


def unavailable(text: str, code: str = "unavailable") -> ApiError:
    """Return the error of a request that the run cannot answer now."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, code, text, retry_after_s=AGAIN_S)


def as_api_error(error: DartError) -> ApiError:
    """Return the answer for an error of any class."""
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
