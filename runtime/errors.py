"""The errors a request can meet. The tree is the documentation; protocols map it to statuses."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

_SHOWN_CHARACTERS = 80
_SHOWN_NAMES = 20


class HearthError(Exception):
    """Base of all errors with a machine-readable `code` and a message written for people."""

    code = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class SettingsError(HearthError):
    """The configuration cannot be used; the message names key, file and remedy."""

    code = "invalid_settings"


class HomeTaken(HearthError):
    """Another server owns the home, or nobody can tell whether one does."""

    code = "home_taken"

    def __init__(self, home: Path, why: str) -> None:
        super().__init__(
            f"{home} cannot be this server's home. {why}. Stop it, or give this one a home of its "
            "own with --home or HEARTH_HOME."
        )


class RequestRejected(HearthError):
    """The request was refused before anything was computed. `param` names the field at fault."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestRejected):
    """A field has a value that cannot be served."""


class UnusableImage(InvalidRequest):
    """An image that cannot be shown to the model; `problem` goes on from its field.

    By the last words Claude Code knows that it is to leave its images out.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem} Could not process image.", field)
        self.problem = problem


MAX_CONTEXT = "max_context"
"""The field with which a request, or an agent, has less than the model's context."""


class PromptChanged(RequestRejected):
    """The answer cannot go on in another worker, which does not read the prompt as the one before
    it did.
    """

    code = "prompt_changed"

    def __init__(self) -> None:
        super().__init__("The prompt is not read as it was when its answer began.")


class ContextTooLong(RequestRejected):
    """The prompt does not fit the model's context, or with `param` "max_context" what the request
    has of it; with `is_least` it may have more tokens. With `is_rest` they are those of what is
    left when all turns but the last one are dropped.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        num_tokens: int,
        context: int,
        param: str | None = "messages",
        *,
        is_least: bool = False,
        is_rest: bool = False,
    ) -> None:
        number = f"at least {num_tokens}" if is_least else str(num_tokens)
        whose, remedy = (
            "This model's maximum context length",
            "choose a model with a longer context",
        )
        if param == MAX_CONTEXT:
            whose, remedy = MAX_CONTEXT, f"raise {MAX_CONTEXT}"
        rest = ", the oldest turns left out," if is_rest else ""
        what = "what the user says last" if is_rest else "the prompt"
        super().__init__(
            f"{whose} is {context} tokens, but the prompt{rest} has {number} tokens. "
            f"Shorten {what} or {remedy}.",
            param,
        )
        self.num_tokens = num_tokens
        self.context = context
        self.is_least = is_least
        self.is_rest = is_rest


class SummaryWanted(RequestRejected):
    """The messages before number `first` are to be summed up before the request is sent again."""

    code = "summary_wanted"

    def __init__(self, first: int) -> None:
        super().__init__(
            "The conversation does not fit, and there is no summary of its beginning now: send "
            "the request again, so that another one is made."
        )
        self.first = first


class UnknownModel(RequestRejected):
    """No such model; `nearest` are the closest names, `reason` why one of that name is no use.

    `public_message` is for those who may not know where things lie on this machine.
    """

    code = "model_not_found"

    def __init__(
        self,
        name: str,
        nearest: tuple[str, ...],
        reason: str | None = None,
        public_reason: str | None = None,
    ) -> None:
        hint = f" Did you mean {', '.join(nearest)}?" if nearest else ""
        what = "does not exist here" if reason is None else f"cannot be used: {reason}"
        super().__init__(f"The model {name!r} {what}.{hint}", "model")
        public = what if public_reason is None else f"cannot be used: {public_reason}"
        self.public_message = f"The model {name!r} {public}.{hint}"
        self.nearest = nearest
        self.reason = reason


class ModelRefused(UnknownModel):
    """There is such a model, and it could only be loaded by code that comes with it."""

    code = "model_needs_own_code"


class ModelDownloading(UnknownModel):
    """The model is on its way to this machine; worth a retry after `retry_after_s`."""

    code = "model_downloading"

    def __init__(self, name: str, how_far: str, retry_after_s: int) -> None:
        super().__init__(name, (), f"it is being downloaded ({how_far})")
        self.message += f" Try again in {retry_after_s} s."
        self.public_message = self.message
        self.retry_after_s = retry_after_s


class ModelNotDownloaded(UnknownModel):
    """The model could not be downloaded; a request after `retry_after_s` has it tried again."""

    code = "download_failed"

    def __init__(self, name: str, why: str, retry_after_s: int) -> None:
        super().__init__(name, (), why.removesuffix("."), "it could not be downloaded")
        again = f" It is tried again after {retry_after_s} s."
        self.message += again
        self.public_message += again
        self.retry_after_s = retry_after_s


class NothingKept(UnknownModel):
    """There is no such model, and none of that name left anything in the store."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name[:_SHOWN_CHARACTERS], tuple(get_close_matches(name, known, n=1)))
        more = ", …" if len(known) > _SHOWN_NAMES else ""
        self.message += f" There are: {', '.join(known[:_SHOWN_NAMES])}{more}."


class UnknownConversation(RequestRejected):
    """Nothing in the store goes by that name, or too much does; the message says what to do."""

    code = "conversation_not_found"


class UnknownAgent(RequestRejected):
    """There is no agent of that id, or none any more."""

    code = "agent_not_found"

    def __init__(self, agent_id: str, note: str = "") -> None:
        super().__init__(
            f"There is no agent {agent_id[:64]!r}. GET /v1/agents lists those there are.{note}",
            "id",
        )


class AgentExists(RequestRejected):
    """An agent of that id was made before."""

    code = "agent_exists"


class TurnConflict(RequestRejected):
    """The agent is not at the turn that the client expects."""

    code = "turn_conflict"


class AgentChanged(RequestRejected):
    """The agent was reset while the request waited or ran; nothing of it was kept."""

    code = "agent_changed"


class Unauthorized(RequestRejected):
    """It needs a key."""


class MissingKey(Unauthorized):
    """It needs a key, and none was sent. `wanted` is the kind of key."""

    code = "missing_api_key"

    def __init__(self, wanted: str) -> None:
        super().__init__(
            f"No key was sent, and this needs an {wanted}: send it as `Authorization: Bearer KEY` "
            "or `x-api-key: KEY`."
        )


class WrongKey(Unauthorized):
    """It needs a key, and the one that was sent is not known."""

    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__(
            "The key that was sent is not known to this server. Its settings hold the digests of "
            "the keys that are; `hearth key` makes a key and its digest."
        )


class TooManyWrongKeys(RequestRejected):
    """Its address gave too many wrong keys; worth a retry after `retry_after_s`."""

    code = "too_many_wrong_keys"

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(
            "Too many wrong keys came from this address, so this one was not looked at. "
            f"Try again in {retry_after_s} s."
        )
        self.retry_after_s = retry_after_s


class Forbidden(RequestRejected):
    """That client may not have that; `code` says why."""

    code = "forbidden"

    def __init__(self, message: str, code: str = "forbidden") -> None:
        super().__init__(message)
        self.code = code


class RequestTimeout(RequestRejected):
    """The client stopped in the middle of its request."""

    code = "request_timeout"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"Nothing more of the request arrived for {limit_s:g} s; send it again.")


class AnswerTooLate(HearthError):
    """The answer did not begin in the time that routes of its kind have."""

    code = "time_limit"

    def __init__(self, limit_s: float, kind: str) -> None:
        super().__init__(f"No answer within {limit_s:g} s, the time_s of [limits.{kind}].")


class UnknownStream(RequestRejected):
    """No stream of that id can be read on; or only from the event `first` on."""

    code = "stream_not_found"

    def __init__(self, stream_id: str, first: int = 0) -> None:
        why = "it was not to be kept, is another key's, or nobody read it for too long"
        if first:
            why = f"its events before {first} are forgotten"
        super().__init__(f"There is no stream {stream_id[:80]!r} to be read on: {why}.", "from")


class UnknownResponse(RequestRejected):
    """No response of that id is stored."""

    code = "response_not_found"

    def __init__(self, response_id: str, note: str = "") -> None:
        super().__init__(
            f"There is no response {response_id[:80]!r}: it was not stored, was deleted, or was "
            f"not used for too long.{note}",
            "response_id",
        )


class UnknownPrevious(RequestRejected):
    """The response that is to be gone on from is not stored, or not all it goes on from is."""

    code = "previous_response_not_found"

    def __init__(self, response_id: str, note: str = "") -> None:
        super().__init__(
            f"Previous response with id {response_id[:80]!r} not found: it was not stored, was "
            f"deleted, or was not used for too long. Send the whole input instead.{note}",
            "previous_response_id",
        )


class ThreadNotFound(RequestRejected):
    """The turn of a message thread is not stored, or not all that it goes on from is."""

    code = "thread_not_found"

    def __init__(
        self, message_id: str, note: str = "", param: str = "thread.previous_message_id"
    ) -> None:
        super().__init__(
            f"There is no thread with a message {message_id[:80]!r}: it was not stored, was "
            "deleted, or was not used for too long. Send the whole conversation with `thread: "
            f'{{"type": "create"}}` instead.{note}',
            param,
        )


class ThreadUnsupported(RequestRejected):
    """Threads cannot be kept now; a client that is told so sends the whole conversation."""

    code = "thread_unsupported_request"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"Threads cannot be kept: {why} Send the whole conversation without `thread`.", "thread"
        )


class UnknownExpired(RequestRejected):
    """Nothing of that id has expired and can be restored."""

    code = "expired_not_found"

    def __init__(self, one_id: str) -> None:
        super().__init__(
            f"Nothing of the id {one_id[:80]!r} can be restored: GET /admin/history, or "
            "`hearth history`, lists what has expired and is not erased yet.",
            "ids",
        )


class UnknownPrewarm(RequestRejected):
    """Nothing that was announced lately has that id."""

    code = "prewarm_not_found"

    def __init__(self, prewarm_id: str) -> None:
        super().__init__(
            f"Nothing is known of {prewarm_id[:64]!r}: it is too old, or from before a restart.",
            "id",
        )


class UnknownCrash(RequestRejected):
    """No lost worker is on record under that id."""

    code = "crash_not_found"

    def __init__(self, crash_id: str) -> None:
        super().__init__(
            f"There is no crash record {crash_id[:64]!r}. GET /admin/crashes lists those there are."
        )


class NotLocal(RequestRejected):
    """Only this machine's own programs may ask for that."""

    code = "not_local"


class StoreUnavailable(HearthError):
    """There is no store to work on, or it fails; `code` stays the same, the message says why."""

    code = "store_unavailable"


class InterchangeFailed(RequestRejected):
    """A stock prompt-cache file cannot be read, written, or does not belong to that model."""

    code = "interchange_failed"


class Overloaded(RequestRejected):
    """Too much is waiting, or the server is stopping; worth a retry after `retry_after_s`."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(Overloaded):
    """The server is stopping; another one may take its place."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The server is stopping.", retry_after_s=5)


class QueueTimeout(Overloaded):
    """The request waited for as long as it may, and its model did not come."""

    code = "queue_timeout"


class NoRoom(Overloaded):
    """What is pinned leaves no room for the model."""

    code = "no_room"


class MemoryShort(Overloaded):
    """The machine has no memory to spare, and nothing is left that could make room."""

    code = "memory_short"

    def __init__(self) -> None:
        super().__init__(
            "The machine is short of memory: other programs take it. Try again later, or unload a "
            "model (POST /admin/models/NAME/unload).",
            retry_after_s=30,
        )


class PinsFull(RequestRejected):
    """A tenant has pinned, or would have, more than its share of the disk; sizes in bytes."""

    code = "pins_full"

    def __init__(self, num_bytes: int, most_bytes: int) -> None:
        super().__init__(
            f"What this key pinned would take {num_bytes / 1e6:.1f} MB of disk, and it may pin "
            f"{most_bytes / 1e6:.1f} MB (pinned_max_bytes, or its part of cache_max_bytes). Leave "
            "out pinned, or take a pin back (DELETE /v1/prewarm/ID).",
            "pinned",
        )
        self.num_bytes, self.most_bytes = num_bytes, most_bytes


class NeedsTooMuchMemory(RequestRejected):
    """The KV of the request can never fit into the memory that models may use; sizes in bytes."""

    code = "kv_too_large"

    def __init__(self, num_bytes: int, limit_bytes: int, param: str) -> None:
        needs, may_use = _told_apart(num_bytes, limit_bytes)
        super().__init__(
            f"The KV of this request takes {needs} GB of memory, and beside the model there are "
            f"{may_use} GB (memory_budget). Shorten {param}, raise the budget, or keep KV in fewer "
            "bits (kv_bits).",
            param,
        )
        self.num_bytes, self.limit_bytes = num_bytes, limit_bytes


class MemoryTaken(Overloaded):
    """Other models leave too little memory for the request; sizes in bytes."""

    code = "memory_taken"

    def __init__(self, num_bytes: int, limit_bytes: int, param: str) -> None:
        needs, may_use = _told_apart(num_bytes, limit_bytes)
        super().__init__(
            f"The KV of this request takes {needs} GB of memory, and beside the loaded models "
            f"there are {may_use} GB now. Try again when one of them has left, unload one (POST "
            f"/admin/models/NAME/unload), or shorten {param}.",
            retry_after_s=30,
        )
        self.param = param
        self.num_bytes, self.limit_bytes = num_bytes, limit_bytes


def _told_apart(one_bytes: int, other_bytes: int) -> tuple[str, str]:
    """Both in GB, with as many digits as it takes to see that they differ, but at least two."""
    pairs = ((f"{one_bytes / 1e9:.{n}f}", f"{other_bytes / 1e9:.{n}f}") for n in range(2, 10))
    return next(pair for pair in pairs if pair[0] != pair[1])


class ModelTooLarge(RequestRejected):
    """The model can never fit into the memory that models may use; sizes in bytes."""

    code = "model_too_large"

    def __init__(self, model: str, num_bytes: int, limit_bytes: int) -> None:
        needs, may_use = _told_apart(num_bytes, limit_bytes)
        super().__init__(
            f"The model {model} needs {needs} GB of memory, but models may use {may_use} GB in all "
            "(memory_budget). Choose a smaller model, shorten its context, or raise the budget.",
            "model",
        )
        self.num_bytes = num_bytes
        self.limit_bytes = limit_bytes


class Preempted(Overloaded):
    """The model had to leave before the answer was complete."""

    code = "preempted"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model} had to leave before the answer was complete.")


class UnknownRequest(RequestRejected):
    """No request of that id is open."""

    code = "request_not_found"


class PoisonRequest(HearthError):
    """Two processes died of this very request; it is not served again for a while."""

    code = "poison_request"


WorkerCause = Literal[
    "not_started",
    "never_up",
    "lacking",
    "limit",
    "helper_lost",
    "told_to_end",
    "out_of_memory",
    "crashed",
    "hung",
    "unfit",
]
"""What a worker ended of; `runtime/supervisor/blame.py` says who is blamed for it."""


class WorkerError(HearthError):
    """The model's process failed, through no fault of the request."""

    code = "model_error"
    retry_after_s = 1
    cause: WorkerCause = "crashed"


class LoadFailed(WorkerError):
    """The model could not be loaded."""

    code = "model_load_failed"
    cause = "unfit"


class MachineFailed(WorkerError):
    """The machine gave the model's process too little, or another program ended a part of it."""

    code = "machine_failed"

    def __init__(self, message: str, cause: WorkerCause = "lacking") -> None:
        super().__init__(message)
        self.cause = cause


class ModelUnavailable(WorkerError):
    """The model failed too often to be tried again now; worth a retry after `retry_after_s`."""

    code = "model_unavailable"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerDied(WorkerError):
    """The model's process ended while the request was open."""

    code = "model_crashed"


class WorkerWedged(WorkerError):
    """The model's process was busy but made no progress and was replaced."""

    code = "model_wedged"
    cause = "hung"


class NoSummary(HearthError):
    """A conversation was to be summed up, and the model wrote nothing that can stand for it."""

    code = "no_summary"

    def __init__(self) -> None:
        super().__init__(
            "The model wrote no summary, so nothing was compacted: ask again, with a larger limit "
            "of output tokens if there is one, or another model."
        )


class Aborted(HearthError):
    """The request was cancelled, by its client or by the operator."""

    code = "cancelled"
