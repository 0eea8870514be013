"""Errors on their way out: one table from exception to status, one envelope for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import structlog
from litestar import MediaType, Request, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi import ResponseSpec
from litestar.params import QueryParameter
from litestar.types import Scope

from api.http.framing import HeadTooLarge, Malformed
from api.observe.record import record_of
from runtime.errors import (
    Aborted,
    AgentChanged,
    AgentExists,
    AnswerTooLate,
    ContextTooLong,
    Forbidden,
    HearthError,
    InterchangeFailed,
    InvalidRequest,
    LoadFailed,
    MachineFailed,
    MemoryShort,
    MemoryTaken,
    MissingKey,
    ModelDownloading,
    ModelNotDownloaded,
    ModelRefused,
    ModelTooLarge,
    ModelUnavailable,
    NeedsTooMuchMemory,
    NoRoom,
    NoSummary,
    NotLocal,
    Overloaded,
    PinsFull,
    PoisonRequest,
    Preempted,
    QueueTimeout,
    RequestRejected,
    RequestTimeout,
    ShuttingDown,
    StoreUnavailable,
    ThreadNotFound,
    ThreadUnsupported,
    TooManyWrongKeys,
    TurnConflict,
    UnknownAgent,
    UnknownConversation,
    UnknownCrash,
    UnknownExpired,
    UnknownModel,
    UnknownPrevious,
    UnknownPrewarm,
    UnknownRequest,
    UnknownResponse,
    UnknownStream,
    WorkerDied,
    WorkerError,
    WorkerWedged,
    WrongKey,
)
from runtime.keys import Principal
from runtime.types import Failed

log = structlog.stdlib.get_logger("hearth.api")


class ClientLeft(HearthError):
    """The client closed the connection; nobody will read the answer."""

    code = "client_left"

    def __init__(self) -> None:
        super().__init__("The client closed the connection before the answer was complete.")


class InvalidJson(RequestRejected):
    """The body is not JSON."""

    code = "invalid_json"

    def __init__(self, reason: str) -> None:
        super().__init__(f"The body is not valid JSON: {reason}. Send one JSON object.")


class BodyTooLarge(RequestRejected):
    """The body has more bytes than are read for its model."""

    code = "request_too_large"

    def __init__(self, limit: int, setting: str) -> None:
        super().__init__(f"The body is too large: at most {limit} bytes are read ({setting}).")


class TooManyParts(RequestRejected):
    """The body is small enough, but it would take too long to decode."""

    code = "too_many_parts"

    def __init__(self, limit: int, setting: str) -> None:
        super().__init__(
            f"The body has too many parts: at most {limit} are read ({setting}). Lists, objects, "
            "field names and texts are parts; so are eight numbers, or eight backslashes in texts. "
            "Send fewer at once, and text as UTF-8 instead of escapes."
        )


class WrongContentType(RequestRejected):
    """The body is declared as something other than it is to be."""

    code = "unsupported_media_type"

    def __init__(self, media_type: str, wanted: str = "application/json") -> None:
        super().__init__(
            f"Send the body with the header `content-type: {wanted}`, "
            f"not {media_type[:64] or 'without a content type'!r}."
        )


class WrongContentEncoding(RequestRejected):
    """The body is compressed."""

    code = "unsupported_media_type"

    def __init__(self, encoding: str) -> None:
        super().__init__(f"Send the body as it is, without content-encoding {encoding[:64]!r}.")


class GenerationFailed(HearthError):
    """A generation ended with a failure after it was accepted; `code` says which."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message)
        self.code = failure.code


class HttpStatus(NamedTuple):
    """How an error shows in HTTP; `type` is one of OpenAI's error types."""

    status: int
    type: str


UNEXPECTED = HttpStatus(500, "server_error")
MAX_RETRY_AFTER_S = 60
"""Some clients give up when they are told to wait for longer."""

STATUSES: dict[type[HearthError], HttpStatus] = {
    InvalidRequest: HttpStatus(400, "invalid_request_error"),
    InvalidJson: HttpStatus(400, "invalid_request_error"),
    Malformed: HttpStatus(400, "invalid_request_error"),
    HeadTooLarge: HttpStatus(431, "invalid_request_error"),
    ContextTooLong: HttpStatus(400, "invalid_request_error"),
    InterchangeFailed: HttpStatus(400, "invalid_request_error"),
    BodyTooLarge: HttpStatus(413, "invalid_request_error"),
    TooManyParts: HttpStatus(400, "invalid_request_error"),
    NotLocal: HttpStatus(403, "permission_error"),
    TooManyWrongKeys: HttpStatus(429, "rate_limit_error"),
    MissingKey: HttpStatus(401, "authentication_error"),
    WrongKey: HttpStatus(401, "authentication_error"),
    Forbidden: HttpStatus(403, "permission_error"),
    UnknownModel: HttpStatus(404, "invalid_request_error"),
    ModelRefused: HttpStatus(404, "invalid_request_error"),
    ModelDownloading: HttpStatus(503, "server_error"),
    ModelNotDownloaded: HttpStatus(503, "server_error"),
    UnknownCrash: HttpStatus(404, "invalid_request_error"),
    UnknownConversation: HttpStatus(404, "invalid_request_error"),
    UnknownResponse: HttpStatus(404, "invalid_request_error"),
    UnknownStream: HttpStatus(404, "invalid_request_error"),
    UnknownPrevious: HttpStatus(400, "invalid_request_error"),
    ThreadNotFound: HttpStatus(404, "invalid_request_error"),
    ThreadUnsupported: HttpStatus(400, "invalid_request_error"),
    UnknownAgent: HttpStatus(404, "invalid_request_error"),
    UnknownExpired: HttpStatus(404, "invalid_request_error"),
    AgentExists: HttpStatus(409, "invalid_request_error"),
    AgentChanged: HttpStatus(409, "invalid_request_error"),
    TurnConflict: HttpStatus(409, "invalid_request_error"),
    RequestTimeout: HttpStatus(408, "invalid_request_error"),
    AnswerTooLate: HttpStatus(504, "server_error"),
    WrongContentType: HttpStatus(415, "invalid_request_error"),
    WrongContentEncoding: HttpStatus(415, "invalid_request_error"),
    UnknownRequest: HttpStatus(404, "invalid_request_error"),
    UnknownPrewarm: HttpStatus(404, "invalid_request_error"),
    ModelTooLarge: HttpStatus(400, "invalid_request_error"),
    PinsFull: HttpStatus(403, "permission_error"),
    NeedsTooMuchMemory: HttpStatus(400, "invalid_request_error"),
    PoisonRequest: HttpStatus(500, "server_error"),
    Overloaded: HttpStatus(429, "rate_limit_error"),
    ShuttingDown: HttpStatus(503, "server_error"),
    QueueTimeout: HttpStatus(503, "server_error"),
    NoRoom: HttpStatus(503, "server_error"),
    MemoryShort: HttpStatus(503, "server_error"),
    MemoryTaken: HttpStatus(503, "server_error"),
    Preempted: HttpStatus(503, "server_error"),
    ClientLeft: HttpStatus(499, "client_left"),
    WorkerError: HttpStatus(503, "server_error"),
    LoadFailed: HttpStatus(503, "server_error"),
    MachineFailed: HttpStatus(503, "server_error"),
    WorkerDied: HttpStatus(503, "server_error"),
    WorkerWedged: HttpStatus(503, "server_error"),
    ModelUnavailable: HttpStatus(503, "server_error"),
    NoSummary: HttpStatus(500, "server_error"),
    Aborted: HttpStatus(503, "server_error"),
    StoreUnavailable: HttpStatus(503, "server_error"),
}
_NOT_WORTH_A_RETRY = frozenset(
    {PoisonRequest.code, ModelTooLarge.code, NeedsTooMuchMemory.code, NoSummary.code, Aborted.code}
)
_WITH_RETRY_AFTER = (
    *(Overloaded, TooManyWrongKeys, WorkerError),
    *(ModelDownloading, ModelNotDownloaded),
)
_BY_CODE = {error.code: status for error, status in STATUSES.items()}
_ROUTE_CODES = {404: "route_not_found", 405: "method_not_allowed"}


class ErrorBody(msgspec.Struct, gc=False):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, gc=False):
    """The body of every answer that is not a success."""

    error: ErrorBody


def documented(
    answer: type[msgspec.Struct], refusal: type[msgspec.Struct] = ErrorEnvelope
) -> dict[int, ResponseSpec]:
    """What OpenAPI says of a handler's answers: this one, and the envelope for each refusal."""
    specs = {
        400: "The request cannot be served as it is; `param` names the field",
        404: "There is no such model",
        429: "Too many requests are open",
        503: "The model could not be loaded, or its process failed",
    }
    answers = {200: ResponseSpec(answer, generate_examples=False, description="The whole answer")}
    return answers | {
        status: ResponseSpec(refusal, generate_examples=False, description=description)
        for status, description in specs.items()
    }


def status_of(error: HearthError) -> HttpStatus:
    """Where this error stands in the table; a class without an entry is unexpected."""
    return _BY_CODE.get(error.code) or STATUSES.get(type(error), UNEXPECTED)


class Refusal(NamedTuple):
    """What a client is going to be told, before a protocol puts it in its own words.

    `status` and `type` are OpenAI's; `error` is what it is about, unless it was met before any
    handler. `headers` belong to every protocol.
    """

    status: int
    type: str
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    error: HearthError | None = None


ErrorWriter = Callable[[Refusal, str], Response[Any]]
"""Turns a refusal, and the id of the request it belongs to, into a protocol's own answer."""


def refusal_of(error: HearthError) -> Refusal:
    """What a client is told of this error."""
    status, type_name = status_of(error)
    headers: dict[str, str] = {}
    if error.code in _NOT_WORTH_A_RETRY:
        headers["x-should-retry"] = "false"
    elif isinstance(error, _WITH_RETRY_AFTER):
        headers["retry-after"] = str(min(error.retry_after_s, MAX_RETRY_AFTER_S))
    elif status == 503:
        headers["retry-after"] = "1"
    param = error.param if isinstance(error, RequestRejected) else None
    return Refusal(status, type_name, error.message, error.code, param, headers, error)


def envelope_of(error: HearthError) -> ErrorEnvelope:
    """The error as OpenAI's clients know it."""
    return _openai_envelope(refusal_of(error))


def openai_error(refusal: Refusal, _: str) -> Response[ErrorEnvelope]:
    """The refusal in OpenAI's words."""
    return Response(
        _openai_envelope(refusal),
        status_code=refusal.status,
        headers=dict(refusal.headers),
        media_type=MediaType.JSON,
    )


def _openai_envelope(refusal: Refusal) -> ErrorEnvelope:
    return ErrorEnvelope(ErrorBody(refusal.message, refusal.type, refusal.param, refusal.code))


AnyRequest = Request[None, None, State]


class ErrorHandlers:
    """Answers every exception, in the words of the protocol that the client speaks.

    `others` are the protocols beside OpenAI's: whether a request is theirs, and how they write.
    """

    def __init__(self, others: Sequence[tuple[Callable[[Scope], bool], ErrorWriter]]) -> None:
        self._others = others

    @property
    def handlers(self) -> dict[int | type[Exception], Callable[..., Response[Any]]]:
        """What Litestar calls for each kind of exception."""
        return {
            HearthError: self._on_hearth_error,
            HTTPException: self._on_http_exception,
            Exception: self._on_unexpected,
        }

    def refuse(self, request: AnyRequest, error: HearthError) -> Response[Any]:
        """The answer to a request that does not get as far as a handler."""
        return self._answer(request, refusal_of(error))

    def _answer(self, request: AnyRequest, refusal: Refusal) -> Response[Any]:
        record = record_of(request.scope)
        record.error_code = refusal.code
        for is_theirs, write in self._others:
            if is_theirs(request.scope):
                return write(refusal, record.request_id)
        return openai_error(refusal, record.request_id)

    def _on_hearth_error(self, request: AnyRequest, error: HearthError) -> Response[Any]:
        refusal = refusal_of(error)
        if isinstance(error, UnknownModel) and _is_tenants(request.scope):
            refusal = refusal._replace(message=error.public_message)
        return self._answer(request, refusal)

    def _on_http_exception(self, request: AnyRequest, error: HTTPException) -> Response[Any]:
        if error.status_code >= 500:
            return self._on_unexpected(request, error)
        return self._answer(request, _of_http_exception(request, error))

    def _on_unexpected(self, request: AnyRequest, error: Exception) -> Response[Any]:
        error_id = record_of(request.scope).request_id
        log.error("unexpected error", error_id=error_id, exc_info=error)
        message = (
            f"Something went wrong inside Hearth; its log has the details under id {error_id}."
        )
        return self._answer(request, Refusal(*UNEXPECTED, message, HearthError.code))


def _is_tenants(scope: Scope) -> bool:
    """Whether it came with the key of a tenant, who is not told where things lie."""
    caller: object = scope["state"].get("caller")
    return isinstance(caller, Principal) and bool(caller.tenant)


def _of_http_exception(request: AnyRequest, error: HTTPException) -> Refusal:
    if isinstance(error, ValidationException) and (found := _wrong_parameter(request, error)):
        message, param = found
        return Refusal(400, "invalid_request_error", message, "invalid_request", param)
    status = error.status_code
    where = f"{request.method} {request.scope['path'][:128]}"
    allowed = ", ".join(sorted((error.headers or {}).get("allow", "").split(", ")))
    message = {
        404: f"There is no {where} here. GET /schema lists what there is.",
        405: f"{where} is not possible; use one of: {allowed}.",
    }.get(status, f"{error.detail}.")
    code = _ROUTE_CODES.get(status, "invalid_request")
    headers = {"allow": allowed} if status == 405 else {}
    return Refusal(status, "invalid_request_error", message, code, headers=headers)


def _wrong_parameter(request: AnyRequest, error: ValidationException) -> tuple[str, str] | None:
    """What is wrong with a parameter of the query, and its name as it was sent."""
    found = error.extra if isinstance(error.extra, list) else []
    known = request.scope["route_handler"].parsed_fn_signature.parameters
    for one in found:
        match one:
            case {"key": str(key), "message": str(problem)}:
                given = known[key].kwarg_definition if key in known else None
                name = given.name or key if isinstance(given, QueryParameter) else key
                expected = problem.partition(", got ")[0].replace(" | null", "")
                for ours, theirs in (("`int`", "`integer`"), ("`bool`", "`boolean`")):
                    expected = expected.replace(ours, theirs)
                return f"{name}: {expected[:1].lower()}{expected[1:]}.", name
            case _:
                continue
    return None
