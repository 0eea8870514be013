"""What crosses the borders between protocols, server and worker: requests in, chunks out."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]
Priority = Literal["interactive", "default", "background"]
Work = Literal["generate", "count", "prefill", "tokenize", "detokenize", "embed", "explain"]
CacheMode = Literal["full", "prefix", "breakpoints", "off"]
Overflow = Literal["refuse", "drop_oldest_turns", "summarise"]
CacheTier = Literal["none", "hot", "warm", "cold"]
MissReason = Literal[
    "first_seen",
    "not_yet_durable",
    "diverged",
    "expired",
    "evicted",
    "damaged",
    "deleted",
    "no_checkpoint",
    "slower_than_prefill",
    "away",
    "unsupported",
    "scored",
    "tools_removed",
    "off",
]

MAX_IMAGE_BYTES = 20 * 1024 * 1024
"""Of one image, encoded."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of the value types: immutable, keyword-only, never part of a reference cycle."""


class ToolCall(Struct, frozen=True):
    """One call an assistant made. `arguments` is JSON text as written, of a custom tool as well."""

    id: str
    name: str
    arguments: str
    is_custom: bool = False


class Image(Struct, frozen=True):
    """A picture inside a message, encoded in `data`, or at `url` and still to be fetched.

    `at` counts the characters of the message's text before it; `field` names it in errors. It is
    shrunk until neither side has more than `max_side` pixels.
    """

    at: int
    field: str
    data: bytes = b""
    url: str | None = None
    max_side: int | None = None

    @property
    def is_lost(self) -> bool:
        """It can be shown to nobody: a line of text takes its place."""
        return not self.data and self.url is None

    def lost(self) -> Image:
        """The same without anything that could be shown."""
        return msgspec.structs.replace(self, data=b"", url=None)


class Breakpoint(Struct, frozen=True):
    """Where in a message a client wants a prefix to end: what is before it is worth `keep_s`
    seconds. It stands after `at` characters of the text, `num_images` pictures, `num_calls` calls.
    """

    at: int
    keep_s: float
    num_images: int = 0
    num_calls: int = 0


class Message(Struct, frozen=True):
    """One turn, already free of its protocol: the text parts of a content list are joined.

    `loaded_tools` names deferred tools whose definition the model is given here.
    """

    role: Role
    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool = False
    images: tuple[Image, ...] = ()
    loaded_tools: tuple[str, ...] = ()
    breakpoints: tuple[Breakpoint, ...] = ()

    def kept(self, keep_s: float) -> Message:
        """The same with a breakpoint at its end."""
        end = Breakpoint(
            at=len(self.text),
            keep_s=keep_s,
            num_images=len(self.images),
            num_calls=len(self.tool_calls),
        )
        return msgspec.structs.replace(self, breakpoints=(*self.breakpoints, end))


class Tool(Struct, frozen=True):
    """A function the model may call. `parameters` is its JSON schema as JSON text.

    A strict tool's arguments must follow the schema, a free-form tool takes one text, and a
    deferred one is not shown until a message loads it. With `keep_s` a client's breakpoint is
    behind it: it and the tools before it are worth that many seconds.
    """

    name: str
    description: str | None = None
    parameters: str = "{}"
    is_strict: bool = False
    is_freeform: bool = False
    is_deferred: bool = False
    keep_s: float | None = None


class ToolChoice(Struct, frozen=True):
    """Whether tools may or must be called; `name` is the one that must be.

    With `allowed` only those may be. All tools are shown whatever the choice is, so that the prompt
    stays the same.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None
    is_parallel: bool = True


ANY_TOOL = ToolChoice()
"""What is meant where nothing is said."""


class Thinking(Struct, frozen=True):
    """How much the model is to think; None leaves it to its template.

    After `budget_tokens` tokens the reasoning is closed and the answer begins. `is_adaptive` leaves
    it to the model at each turn. It `is_switched_on` where a switch says so, whatever else is said
    of how much. `fields` are the places of the request that say it.
    """

    is_enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None
    is_adaptive: bool = False
    is_switched_on: bool = False
    fields: tuple[str, ...] = ()

    @classmethod
    def switched(cls, is_on: bool | None, *fields: str) -> Thinking:
        """What a switch says that is on or off, or not there."""
        return cls(is_enabled=is_on, is_switched_on=bool(is_on), fields=fields)

    @property
    def is_unsaid(self) -> bool:
        return (self.is_enabled, self.effort, self.budget_tokens) == (None, None, None)


class Constraint(Struct, frozen=True):
    """What the answer's text must be: `text` is a JSON schema, a regular expression or a grammar
    in the notation of Lark or GBNF; a `json_object` needs none. `field` names it in errors.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark", "gbnf"]
    text: str = "{}"
    field: str = "response_format"


class SamplingParams(Struct, frozen=True):
    """How the next token is chosen; None means not given, so that a later default may apply.

    `presence_penalty` and `frequency_penalty` look at generated tokens only, `repetition_penalty`
    at the prompt too: at the last `repetition_context_size` tokens of both, as mlx-lm means
    it (0: all of them, also the default here). `logit_bias` holds (token id, bias) pairs.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with what was not given taken from `defaults`."""
        given = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None and value != ()
        }
        return msgspec.structs.replace(defaults, **given)


OWN_KWARGS = frozenset(
    {
        *("messages", "conversation", "tools", "documents"),
        *("tokenize", "chat_template", "continue_final_message"),
    }
)
"""Arguments of a chat template that nobody else may take the place of."""


class ChatPrompt(Struct, frozen=True, tag="chat"):
    """A conversation to be rendered through the model's chat template.

    `template_kwargs` is a JSON object handed to the template as it is. With `continues_last` a last
    message of the assistant's is the beginning of the answer.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ANY_TOOL
    thinking: Thinking = Thinking()
    template_kwargs: str = "{}"
    continues_last: bool = False


class TextPrompt(Struct, frozen=True, tag="text"):
    """Text to be continued as it is, without a template; with a `suffix`, as far as up to that."""

    text: str
    suffix: str = ""


class TokenPrompt(Struct, frozen=True, tag="tokens"):
    """Token ids to be continued as they are."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class CacheParams(Struct, frozen=True):
    """What a request wishes of the KV cache.

    `prefix` keeps only what precedes the first turn (system prompt and tools), `breakpoints` what
    precedes the last breakpoint, `off` neither reads nor keeps KV; the model reads the same tokens
    in all of them. `ttl_s` is how long the KV may stay on disk unused: 0 keeps it in memory only,
    None leaves it to the server. `keep_s` is how long it is to stay at least. `session_id` names
    the conversation for listing and deleting; what matches is decided by content alone. A `prefill`
    with a `pin` has its KV stay until that pin is taken back; in `prefix` mode that of the prefix.
    After the answer its client is away for `pause_s` seconds, or with `is_last` for good. Requests
    of two tenants share nothing. `after_deletion` is the number of the last deletion before it
    came: later ones concern it.
    """

    mode: CacheMode = "full"
    ttl_s: float | None = None
    keep_s: float | None = None
    session_id: str | None = None
    pin: str | None = None
    pause_s: float | None = None
    is_last: bool = False
    tenant: str = ""
    after_deletion: int = 0


class LineRule(Struct, frozen=True):
    """A rule of the owner's: lines of a system prompt that begin with `begins` are read first, or
    last. It is told as `name`.
    """

    name: str
    begins: str
    to: Literal["first", "last"] = "last"


class Summary(Struct, frozen=True):
    """What stands for a request's messages before number `first`; no text where there is none."""

    first: int
    text: str


class GenerateRequest(Struct, frozen=True):
    """What every protocol asks of the engine. `deadline_s` counts from the submission, as does
    `idle_s`: so long it waits at most for a time when nobody else is served.

    `count` only counts the prompt's tokens, `prefill` only computes its KV; both finish without
    an answer. `tokenize` is answered by `Tokens`, `detokenize` by text, `embed` by `Embedding`,
    `explain` by `Explained`.
    `max_prompt_tokens` is narrower than the model's context. With `scores_prompt` the prompt comes
    back as `PromptLogprobs`, each token with `top_logprobs` alternatives; its KV is computed anew.
    `client` is the family of the program that asks, as its headers tell it, and `keep_alive_s` how
    long the model stays loaded afterwards (0: not at all, negative: for ever). Without `priority`
    it has its model's. `context` (0: that of the loaded model) and `rules_off`, names of prompt
    rules that are off, are those of the name that is asked; `own_rules` are the owner's for the
    client. Prompt and answer together have `max_context` tokens at most, if that is less.
    `overflow` is what is done with a conversation that does not fit, None what its model's
    settings say; `summaries` were made of its beginnings for that. `said` is where an answer goes
    on whose worker was lost. The answer is expected to be like `prediction`; it `speculates` where
    its name may. The last message of a `prefill` is still being written where `written_by` names
    the request that writes it: nothing behind its breakpoint is computed, and it may be computed
    while only that one decodes. `ignored` is what was found to have no effect before it came to
    the worker, which tells it with the answer. With `is_default_max` its `max_tokens` is what the
    server's settings say, and no wish of the client's.
    """

    request_id: str
    model: str
    prompt: Prompt
    work: Work = "generate"
    priority: Priority | None = None
    client: str = ""
    keep_alive_s: float | None = None
    sampling: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    max_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_context: int | None = None
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    top_logprobs: int | None = None
    scores_prompt: bool = False
    ignore_eos: bool = False
    deadline_s: float = 600.0
    idle_s: float = 0.0
    cache: CacheParams = CacheParams()
    context: int = 0
    rules_off: tuple[str, ...] = ()
    own_rules: tuple[LineRule, ...] = ()
    overflow: Overflow | None = None
    said: SaidAnswer | None = None
    summaries: tuple[Summary, ...] = ()
    prediction: str = ""
    speculates: bool = False
    written_by: str | None = None
    ignored: tuple[str, ...] = ()
    is_default_max: bool = False

    def context_within(self, loaded: int) -> int:
        """How many tokens prompt and answer may have where the loaded model has so many."""
        context = self.context or loaded
        return min(context, self.max_context or context)


class SaidChoice(Struct, frozen=True):
    """What was said of a choice: its tokens, their `logprobs` where these are asked for, and the
    ids that its tool calls were given, in their order.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    call_ids: tuple[str, ...] = ()
    is_finished: bool = False


class SaidAnswer(Struct, frozen=True):
    """What was said to a prompt, which is read again; `prompt_digest` tells whether it is the same
    as before. `turns` are the generated ones that it begins with, as `store.turns.pack_row` has
    them: of those that were just said nothing may be on disk yet.
    """

    prompt_digest: bytes
    turns: bytes
    choices: tuple[SaidChoice, ...]


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Log probability (natural) of one token; `token` is its text, `bytes` its raw bytes."""

    token: str
    token_bytes: bytes
    logprob: float


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """The chosen token and its most likely alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class CacheUse(Struct, frozen=True):
    """What a request reused, from which tier, and why no more of its prompt.

    `tier` is the slowest that was needed. `reason` is None when all that can be reused was; `at`
    is the position from which on it was not. The first `num_durable` of its tokens were on disk
    when it ended: they survive whatever happens to the process. Of the prompt the first `num_kept`
    are kept, all of them where it is None; what is before a position of `keeps` is for so many
    seconds at least.
    """

    tier: CacheTier = "none"
    num_tokens: int = 0
    num_durable: int = 0
    restore_ms: float = 0.0
    reason: MissReason | None = None
    at: int = 0
    num_kept: int | None = None
    keeps: tuple[tuple[int, float], ...] = ()

    def num_written(self, num_prompt_tokens: int) -> int:
        """How many of a prompt's tokens were computed and are kept."""
        kept = num_prompt_tokens if self.num_kept is None else self.num_kept
        return max(min(kept, num_prompt_tokens) - self.num_tokens, 0)

    def num_written_for(self, keep_s: float, num_prompt_tokens: int) -> int:
        """How many of these are kept for so long at least, as breakpoints say."""
        end = max((at for at, seconds in self.keeps if seconds >= keep_s), default=0)
        return min(max(end - self.num_tokens, 0), self.num_written(num_prompt_tokens))


class PromptChange(Struct, frozen=True):
    """A rule that changed a prompt before the model saw it, and how many places it changed.

    Where it left turns of the conversation out: how many turns, and their tokens.
    """

    rule: str
    num_places: int = 1
    num_turns: int = 0
    num_tokens: int = 0


class Usage(Struct, frozen=True):
    """Token counts of a choice and where its time went. Counts include special tokens.

    Of the tokens that were guessed, by a prediction or by what was said before, so many were
    accepted into the answer, and so many rejected.

    `ignored` are fields of the request that have no effect with this model. `head` is the prompt's,
    which is known of some without a session id: it is by tokens that these are deleted.
    """

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    cache: CacheUse = CacheUse()
    prompt_changes: tuple[PromptChange, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def num_cached_tokens(self) -> int:
        return self.cache.num_tokens


class PrefillProgress(Struct, frozen=True, tag="p", array_like=True):
    """Prompt tokens computed so far, of all that must be computed."""

    num_done: int
    num_total: int


class PromptLogprobs(Struct, frozen=True, tag="l", array_like=True):
    """The next tokens of a prompt that is scored, for all choices; `text` is what they say.

    Parallel lists: each token as text, where it begins in the prompt's text, and how likely it was
    after those before it, which nothing says of the first.
    """

    index: int
    text: str
    tokens: tuple[str, ...]
    offsets: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class TextDelta(Struct, frozen=True, tag="t", array_like=True):
    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class ReasoningDelta(Struct, frozen=True, tag="r", array_like=True):
    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class TextWasReasoning(Struct, frozen=True, tag="o", array_like=True):
    """All text of the choice so far was reasoning; the last piece of it is the mark of its end.

    There is none where it has been told as reasoning.
    """

    index: int


class ReasoningWasText(Struct, frozen=True, tag="a", array_like=True):
    """All reasoning of the choice so far was its answer, which the next piece of text repeats."""

    index: int


class ToolCallDelta(Struct, frozen=True, tag="c", array_like=True):
    """A piece of a tool call; `call_index` counts the calls of this choice from 0.

    The first piece of a call has its `id` and `name`; the `arguments` of all pieces, joined, are
    the JSON text. A call is complete when the next one, text, or the end follows.
    """

    index: int
    call_index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class Finished(Struct, frozen=True, tag="f", array_like=True):
    """The last chunk of a choice. `stop` is the stop string that ended it.

    `notes` are machine-readable remarks, `malformed_tool_call` for one.
    """

    index: int
    reason: FinishReason
    usage: Usage
    stop: str | None = None
    notes: tuple[str, ...] = ()


class Tokens(Struct, frozen=True, tag="k", array_like=True):
    """The prompt's token ids."""

    index: int
    token_ids: tuple[int, ...]


class PromptPart(Struct, frozen=True, array_like=True):
    """A piece of a prompt as the model reads it, what it is made of, and the rules that touched it.

    A source is a place in the request: `messages[2] (user)`, `tools`.
    """

    sources: tuple[str, ...]
    text: str
    num_tokens: int
    rules: tuple[str, ...] = ()


class Explained(Struct, frozen=True, tag="w", array_like=True):
    """A prompt as the model reads it, piece by piece, and its tokens."""

    index: int
    parts: tuple[PromptPart, ...]
    token_ids: tuple[int, ...]


class Embedding(Struct, frozen=True, tag="e", array_like=True):
    """What stands for the whole prompt: little-endian float32 values."""

    index: int
    values: bytes


class Failed(Struct, frozen=True, tag="x", array_like=True):
    """The last chunk of a whole generation that cannot go on. `code` is machine-readable."""

    code: str
    message: str


Chunk = (
    PrefillProgress
    | PromptLogprobs
    | TextDelta
    | ReasoningDelta
    | TextWasReasoning
    | ReasoningWasText
    | ToolCallDelta
    | Tokens
    | Explained
    | Embedding
    | Finished
    | Failed
)


class Pooling(Struct, frozen=True):
    """How an embedding model makes one vector of many; its `modules.json` says so."""

    kind: Literal["mean", "last_token"]
    is_normalised: bool = True


class SharedWeights(Struct, frozen=True):
    """What the `names` have in common whose weights one process computes for all of them.

    It goes by `engine`, the first of them, and has room for the largest of their contexts.
    """

    engine: str
    names: tuple[str, ...]
    context: int


CAPABILITIES = ("completion", "chat", "tools", "vision")
"""All that can be said of a model, in this order."""


ToolUse = Literal["native", "generic", "no", "untried"]
"""How a model is shown tools: by its own template, as text, or not at all.

`untried` is one of the first two, and which is known when it is loaded.
"""


class TemplateForms(Struct, frozen=True):
    """In what forms a model's chat template shows a conversation, as was found by asking it.

    `content`: texts are strings, lists of parts, or one or the other by role. `system`: there is
    such a role, or its text is in a user's turn. `tools`, `calls` and `results` have forms of its
    own, or are given as text. It takes `arguments` of calls as objects, or only as texts in JSON.
    `lost` is what it leaves out in every form.
    """

    content: Literal["string", "parts", "mixed"] = "string"
    system: Literal["native", "user"] = "native"
    tools: Literal["native", "generic"] = "native"
    calls: Literal["native", "generic"] = "native"
    arguments: Literal["object", "text"] = "object"
    results: Literal["native", "generic"] = "native"
    lost: tuple[str, ...] = ()


class ModelSpec(Struct, frozen=True):
    """A model that can be named: where its weights are and how it is to be run.

    `context` is the largest number of tokens of prompt and answer together. `kv_bytes_per_token`
    is None where the configuration does not tell it; layers that keep less are counted in full.
    Only a model with a `pooling` gives embeddings. mlx-vlm loads one that `is_vision`; encoding an
    image takes up to `image_bytes`. A `chat_template` is the file with the one that it is given
    instead of its own, and `tool_use` what the text of its template tells.
    """

    id: str
    path: str
    context: int
    model_type: str
    nbytes: int
    created_s: int
    kv_bytes_per_token: int | None = None
    pooling: Pooling | None = None
    sampling: SamplingParams = SamplingParams()
    aliases: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ("completion",)
    is_vision: bool = False
    image_bytes: int = 0
    chat_template: str = ""
    tool_use: ToolUse = "no"
    draft: ModelSpec | None = None
    """The smaller model that guesses what this one says next; its process loads both."""
    shared: SharedWeights | None = None
    """Set where several names have the same weights, loaded in the same way."""

    @property
    def engine(self) -> str:
        """The name that its process goes by."""
        return self.shared.engine if self.shared is not None else self.id

    @property
    def names(self) -> tuple[str, ...]:
        """All names that its process serves."""
        return self.shared.names if self.shared is not None else (self.id,)

    @property
    def loaded(self) -> ModelSpec:
        """What its process is started with: the same whichever of its names is asked first."""
        if self.shared is None:
            return self
        return msgspec.structs.replace(self, id=self.shared.engine, context=self.shared.context)

    @property
    def sees(self) -> bool:
        """It may be sent images."""
        return "vision" in self.capabilities
