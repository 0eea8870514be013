"""Refusals and failures in Anthropic's words."""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import MediaType, Response
from litestar.types import Scope
from msgspec import UNSET, UnsetType

from api.http.errors import Refusal
from runtime.errors import ContextTooLong, LoadFailed, ThreadUnsupported

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# A model that cannot be loaded will not be loaded by asking again, whatever its status says.
HOPELESS = frozenset({LoadFailed.code})


class ErrorDetails(msgspec.Struct, gc=False, omit_defaults=True):
    """`error_code` names the cause, `param` the field at fault where there is one; `unsupported`
    what a client is to leave out, and be answered.
    """

    error_code: str
    param: str | UnsetType = UNSET
    unsupported: list[str] | UnsetType = UNSET


class ErrorBody(msgspec.Struct, gc=False):
    type: str
    message: str
    details: ErrorDetails


class ErrorAnswer(msgspec.Struct, gc=False, kw_only=True):
    """The body of every answer that is not a success, and the event that ends a failed stream."""

    type: Literal["error"] = "error"
    error: ErrorBody
    request_id: str


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's clients', by its path or else by its headers."""
    path = scope["path"]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return True
    return any(name.startswith(b"anthropic-") for name, _ in scope["headers"])


def error_answer(refusal: Refusal, request_id: str) -> ErrorAnswer:
    """What a client reads of a refusal. A prompt that is too long is told as clients expect it."""
    message = refusal.message
    if isinstance(refusal.error, ContextTooLong):
        # One token of the context is the answer's.
        tokens, maximum = refusal.error.num_tokens, refusal.error.context - 1
        message = f"prompt is too long: {tokens} tokens > {maximum} maximum"
    details = ErrorDetails(refusal.code, refusal.param or UNSET)
    if isinstance(refusal.error, ThreadUnsupported):
        details.unsupported = ["thread"]
    kind = TYPES.get(_status(refusal), "invalid_request_error")
    return ErrorAnswer(error=ErrorBody(kind, message, details), request_id=request_id)


def anthropic_error(refusal: Refusal, request_id: str) -> Response[ErrorAnswer]:
    """The refusal as an HTTP answer, which says whether it is worth a retry."""
    status = _status(refusal)
    headers = dict(refusal.headers)
    if status in (429, 529):
        headers = {"retry-after": "1", "x-should-retry": "true"} | headers
    elif status >= 500:
        headers.setdefault("x-should-retry", "false" if refusal.code in HOPELESS else "true")
    if headers.get("x-should-retry") == "false":
        headers.pop("retry-after", None)
    return Response(
        error_answer(refusal, request_id),
        status_code=status,
        headers=headers,
        media_type=MediaType.JSON,
    )


def _status(refusal: Refusal) -> int:
    """Anthropic's status: a part of the server that fails for now counts as overloaded."""
    if refusal.status == 503:
        return 500 if refusal.code in HOPELESS else 529
    return refusal.status
