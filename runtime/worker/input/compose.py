"""Compose: a chat request becomes token ids, with where they may be cut and taken up again.

Stabilise, arrange, heal, render, tokenize, in this order. Belongs to the intake thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import astuple

from runtime.errors import ContextTooLong, InvalidRequest
from runtime.kv.media import Medium, Placed, located, moved, place_media
from runtime.prompt.arrange import arranging_steps
from runtime.prompt.canonical import (
    advance,
    answer,
    chain,
    defaults_of,
    digest,
    forms,
    is_same_thought,
    thoughts_of,
)
from runtime.prompt.healing import (
    SENTINEL,
    KnownPrefix,
    Lineage,
    Spliced,
    TurnScope,
    splice,
    thinned,
)
from runtime.prompt.kept_tools import KEPT_TOOLS, packed, with_tools_of
from runtime.prompt.rewriting import RenderedMessage, RewriteStep, rewrite
from runtime.prompt.seal import Seal
from runtime.prompt.stabilise import stabilising_steps
from runtime.types import (
    ChatPrompt,
    GenerateRequest,
    LineRule,
    Message,
    MissReason,
    PromptChange,
    ToolCall,
)
from runtime.worker.input.beginning import Beginning, gone_on, taken_out
from runtime.worker.input.half_answers import Half, HalfAnswers
from runtime.worker.input.kept import READ, Found, KeptTurn, kept_turns, leaves_room
from runtime.worker.input.places import (
    end_of_head,
    keeps_at,
    known_keeps,
    marks_of,
    varying_at,
)
from runtime.worker.input.template import TOOLS_FIRST, Marked, Template
from runtime.worker.input.turns import TurnStore, known_prefix
from runtime.worker.output.dialect import Dialect
from store.keyed_names import Asker
from store.types import MediaSpan

MAX_BOUNDARIES = 8
_MAX_HALVES = 4
"""So many messages of a request are compared with answers that may have been cut."""
HEALED = "healed_turn"
BEGUN = "begun_answer"
THOUGHTS_UNKNOWN = "earlier_thoughts_unknown"
"""The session's answers came back without their thoughts, behind a text that is not as it was."""
_PROBE = (
    Message(role="user", text="a"),
    Message(
        role="assistant",
        text="b",
        reasoning="c",
        tool_calls=(ToolCall(id="call00001", name="d", arguments='{"e": 1}'),),
    ),
    Message(role="tool", text="f", tool_call_id="call00001", name="d"),
    Message(role="assistant", text="g", reasoning="h"),
    Message(role="user", text="i"),
)


class HealingCounts(Protocol):
    """Where it is counted how many turns were put back."""

    num_healed_turns: int


class PromptInput(NamedTuple):
    """A request, stabilised and arranged, with the digests of its conversation.

    `sent` are its messages as they came, of which `parts` says what each is made of. `links` name
    the conversation message by message, `bare` name it whatever its tools are. `begun_link`
    names it with the beginning of the answer, if it has one. `media` are its pictures by digest.
    """

    prompt: ChatPrompt
    sent: tuple[Message, ...]
    parts: tuple[RenderedMessage, ...]
    links: list[bytes]
    bare: list[bytes]
    changes: tuple[PromptChange, ...]
    asker: Asker
    beginning: Beginning | None = None
    begun_link: bytes = b""
    media: Mapping[bytes, Medium] = {}
    tenant: str = ""

    def pictures(self, messages: Sequence[Message]) -> list[Medium]:
        """Those of some messages, in their order."""
        return [self.media[image.data] for message in messages for image in message.images]


class Composed(NamedTuple):
    """A prompt's tokens, with identity ids for the pictures at `media`.

    Tools and system prompt end at `prefix_end`. `boundaries` are worth a checkpoint, those of
    `passing` in memory only; what is before a position of `keeps` is worth so many seconds.
    `lineage` is None when the answer is not to be recognised. `beginning` is what the answer has
    said already, `asked` what it was composed of, `reason` why less of it is known than might be.
    `packed` are the same tokens of four bytes each, or nothing where they are not at hand.
    `notes` are machine-readable remarks for the answer.
    """

    token_ids: list[int]
    prefix_end: int = 0
    boundaries: tuple[int, ...] = ()
    passing: frozenset[int] = frozenset()
    keeps: tuple[tuple[int, float], ...] = ()
    changes: tuple[PromptChange, ...] = ()
    lineage: Lineage | None = None
    beginning: Beginning | None = None
    media: tuple[MediaSpan, ...] = ()
    asked: PromptInput | None = None
    reason: MissReason | None = None
    packed: array[int] = array("I")
    notes: tuple[str, ...] = ()

    def up_to_last_keep(self) -> Composed:
        """What is to be computed up to the last breakpoint: its tokens and one more."""
        end = max((at for at, _ in self.keeps), default=0)
        if not end:
            return self
        return self._replace(
            token_ids=self.token_ids[: end + 1],
            boundaries=tuple(at for at in self.boundaries if at <= end),
        )


@dataclass(slots=True)
class Composer:
    """Composes for one name. `context` is in tokens; with `needs_state` boundaries matter.
    `cut` is done to a conversation before all else.
    """

    template: Template
    turns: TurnStore
    counts: HealingCounts
    context: int
    needs_state: bool
    eos_token_ids: frozenset[int] = frozenset()
    rules_off: frozenset[str] = frozenset()
    own_rules: tuple[LineRule, ...] = ()
    cut: tuple[RewriteStep, ...] = ()
    dialect: Dialect = field(default_factory=Dialect)
    seal: Seal = field(default_factory=Seal)

    @property
    def _num_ends(self) -> int:
        """Of so many messages the ends are worth a boundary."""
        return MAX_BOUNDARIES - 1 if self.needs_state else 0

    def asked_by(self, request: GenerateRequest) -> Composer:
        """The same with the context of a request, and the prompt rules of the name it asks."""
        context, off = request.context_within(self.context), frozenset(request.rules_off)
        own = request.own_rules
        if (context, off, own) == (self.context, self.rules_off, self.own_rules):
            return self
        template = self.template.arranged(tools_first=TOOLS_FIRST not in off)
        return replace(self, template=template, context=context, rules_off=off, own_rules=own)

    def compose(
        self,
        request: GenerateRequest,
        prompt: ChatPrompt,
        media: Mapping[bytes, Medium] | None = None,
    ) -> Composed:
        """The prompt of a request. Its images have digests in place of bytes, keys of `media`.

        Raises:
            InvalidRequest: the template refuses it.
            ContextTooLong: it cannot fit, however it is tokenized.
        """
        asked = self._asked(request, prompt)._replace(media=media or {})
        self._fetch(asked)
        found = self._known(asked)
        kept = self._kept(asked, found, request)
        for other in self._asked_with(kept, request, prompt):
            pictured = other._replace(media=asked.media)
            if (composed := self._fitting(pictured, request, prompt)) is not None:
                return composed
        known = found[0] if found is not None else -1
        is_less = not prompt.tools and any(one.number > known for one in kept)
        composed = self._composed(asked, found, request)
        return composed._replace(reason="tools_removed" if is_less else None)

    def _fetch(self, asked: PromptInput) -> None:
        """Have what heads on disk have of its conversation, unless its last answer is at hand."""
        links, bare, messages = asked.links, asked.bare, asked.prompt.messages
        if not links:
            return
        answers = [n for n, one in enumerate(messages) if one.role == "assistant" and n][::-1]
        wanted = [asked.begun_link, links[-1]] if asked.begun_link else []
        scope, last = _scope(asked), answers[0] if answers else 0
        if wanted or (last and not self.turns.has(links[last], bare[last], scope)):
            wanted += [one for n in answers for one in (links[n], bare[n], links[n - 1])]
            self.turns.fetch(wanted, scope)

    def _kept(
        self, asked: PromptInput, found: Found | None, request: GenerateRequest
    ) -> Sequence[KeptTurn]:
        """Turns under other tools; a conversation of its own without any counts as known."""
        if request.work not in READ or KEPT_TOOLS in self.rules_off:
            return ()
        is_known = found is not None and (
            bool(asked.prompt.tools) or self.turns.is_of(found[1].turns[-1], _scope(asked))
        )
        return kept_turns(self.turns, asked.bare, found if is_known else None)

    def _asked_with(
        self, kept: Sequence[KeptTurn], request: GenerateRequest, prompt: ChatPrompt
    ) -> list[PromptInput]:
        """The same with the tools of turns that it goes on from, as far as that may be.

        Tools that it lacks must have been this very conversation's, not those of one that only
        reads the same: by its session, or else by all that it began with, if there is one only.
        """
        others: list[PromptInput] = []
        for one in kept:
            changed = with_tools_of(
                prompt, one.tools, can_forbid=bool(self.template.spoken(self.dialect).tool_start)
            )
            if changed is None:
                continue
            other = self._asked(request, changed.prompt)
            is_same = one.turn.key in other.links
            if is_same and (prompt.tools or self.turns.is_of(one.turn, _scope(other))):
                others.append(other._replace(changes=(*other.changes, changed.change)))
        is_named = bool(prompt.tools) or request.cache.session_id is not None
        return others if is_named or len(others) == 1 else []

    def _fitting(
        self, asked: PromptInput, request: GenerateRequest, prompt: ChatPrompt
    ) -> Composed | None:
        """Composed with kept tools, unless tools that were not sent leave too little room."""
        try:
            composed = self._composed(asked, self._known(asked), request)
        except (ContextTooLong, InvalidRequest):
            return None
        fits = leaves_room(len(composed.token_ids), self.context, request)
        return composed if prompt.tools or fits else None

    def _composed(
        self, asked: PromptInput, found: Found | None, request: GenerateRequest
    ) -> Composed:
        composed = self._joined_or_fresh(asked, found, request)
        notes = (THOUGHTS_UNKNOWN,) if found is None and self._lacks_thoughts(asked) else ()
        return composed._replace(beginning=asked.beginning, asked=asked, notes=notes)

    def _lacks_thoughts(self, asked: PromptInput) -> bool:
        """None of its answers has thoughts, though those of the same session here had some."""
        answers = [one for one in asked.prompt.messages if one.role == "assistant"]
        if not (answers and asked.links) or asked.asker.session_id is None:
            return False
        return not any(map(thoughts_of, answers)) and self.turns.had_thoughts(_scope(asked))

    def _joined_or_fresh(
        self, asked: PromptInput, found: Found | None, request: GenerateRequest
    ) -> Composed:
        if asked.begun_link and (resumed := self._resumed(asked)) is not None:
            return resumed
        if found is not None:
            healed = self._healed(asked, *found)
            if healed is not None:
                return healed
        has_head = self.needs_state or request.cache.mode == "prefix"
        fresh = self._fresh(asked, has_head=has_head)
        lineage = self._lineage(asked, fresh) if asked.links else None
        return fresh._replace(changes=(*asked.changes, *fresh.changes), lineage=lineage)

    def _asked(self, request: GenerateRequest, prompt: ChatPrompt) -> PromptInput:
        rewritten = rewrite(prompt.messages, self._steps(request, prompt))
        changes = rewritten.changes
        arranged = msgspec.structs.replace(prompt, messages=rewritten.messages)
        arranged, beginning = taken_out(arranged, self.dialect)
        if beginning is not None:
            changes = (*changes, PromptChange(rule=BEGUN))
        is_kept = HEALED not in self.rules_off  # whatever is kept of KV: the same tokens are read
        whose: tuple[object, ...] = (request.cache.tenant,) if request.cache.tenant else ()
        if self.rules_off or self.own_rules:
            whose = (request.cache.tenant, sorted(self.rules_off), *map(astuple, self.own_rules))
        links, bare = _links(self.template, arranged, whose) if is_kept else ([], [])
        asker = Asker(request.model, request.cache.session_id)
        sent, parts = prompt.messages, rewritten.parts
        asked = PromptInput(arranged, sent, parts, links, bare, changes, asker, beginning)
        begun_link = _begun_link(links, beginning)
        return asked._replace(begun_link=begun_link, tenant=request.cache.tenant)

    def _steps(self, request: GenerateRequest, prompt: ChatPrompt) -> list[RewriteStep]:
        """All that is done to a request's messages before they are rendered."""
        probe, tenant = self.template.probe, request.cache.tenant
        stabilising = stabilising_steps(request.client, self.rules_off, self.own_rules)
        codes = partial(self.seal.codes, tenant=tenant)
        arranging = arranging_steps(probe.abilities, codes, prompt.tools, probe.definition)
        return [*self.cut, *stabilising, *arranging]

    def _lineage(
        self, asked: PromptInput, composed: Composed, known: KnownPrefix | None = None
    ) -> Lineage:
        start = len(known.token_ids) if known is not None else 0
        return Lineage(
            key=asked.links[-1],
            scope=_scope(asked),
            way=known.turns if known is not None else (),
            start=start,
            ends=tuple(end for end in composed.boundaries if end > start),
            prefix_end=composed.prefix_end,
            begun=asked.beginning.text if asked.beginning is not None else "",
            bare=asked.bare[-1] if asked.prompt.tools else b"",
            tools=packed(asked.prompt.tools),
        )

    # With turns of ours

    def _known(self, asked: PromptInput) -> Found | None:
        """The last message that is a turn of ours, and all tokens up to its end.

        Whoever gives other thoughts back than the model had wants them to be read.
        """
        if not asked.links:
            return None
        links, scope = asked.links[:-1], _scope(asked)
        while links and (found := self._last_turn(asked, links, scope)) is not None:
            number, answers = found
            edits = [_edited(asked, known) for known in answers]
            if None in edits:
                return number, answers[edits.index(None)]
            links = links[: max(edited for edited in edits if edited is not None)]
        return None

    def _last_turn(
        self, asked: PromptInput, links: Sequence[bytes], scope: TurnScope
    ) -> tuple[int, list[KnownPrefix]] | None:
        """The last of these messages that is an answer of ours, or half of one."""
        found = self.turns.find(links, scope)
        num_tried = 0
        for number in range(len(links) - 1, found[0] if found is not None else 0, -1):
            message = asked.prompt.messages[number]
            if message.role != "assistant" or num_tried == _MAX_HALVES:
                continue
            bare = asked.bare[number] if asked.prompt.tools else b""
            half = Half(message, links[number], bare)
            halves, is_tried = self._halves(asked, links[number - 1], half)
            if halves:
                return number, halves
            num_tried += is_tried
        return found

    def _halves(
        self, asked: PromptInput, question: bytes, half: Half
    ) -> tuple[list[KnownPrefix], bool]:
        """Answers of ours to a question as far as a client gives them back, if there are any."""
        ways = self.turns.to_question(question)
        dialect = self.template.spoken(self.dialect)
        halves = HalfAnswers(self.template, dialect, asked.prompt, self.eos_token_ids)
        cut = [halves.cut(way, half) for way in ways]
        return [known_prefix(way) for way in cut if way is not None], bool(ways)

    def _resumed(self, asked: PromptInput) -> Composed | None:
        """The very tokens of an answer that was cut off and is to go on, where they are known."""
        found = self.turns.find([asked.begun_link], _scope(asked))
        answers = found[1] if found is not None else []
        if not answers and asked.beginning is not None:
            message = Message(role="assistant", text=asked.beginning.text, reasoning=" ")
            half = Half(message, asked.begun_link, b"")
            answers, _ = self._halves(asked, asked.links[-1], half)
        known = next((one for one in answers if _edited(asked, one) is None), None)
        if known is None:
            return None
        if known.token_ids[-1] in self.eos_token_ids or len(known.token_ids) >= self.context:
            return None
        media = located(known.packed, asked.pictures(asked.prompt.messages))
        if media is None:
            return None
        ends = known.ends if self.needs_state else ()
        cut = _cut(known.token_ids, known.prefix_end, [], ends)
        changes = self.template.write(asked.prompt, first=len(asked.prompt.messages)).changes
        return self._counted(asked, cut._replace(media=media, changes=changes), known)

    def _healed(self, asked: PromptInput, number: int, known: KnownPrefix) -> Composed | None:
        """The known tokens, and those of what follows message `number`; None when in doubt."""
        if any(SENTINEL in message.text for message in asked.prompt.messages):
            return None
        composed = self._continued(asked, number, known)
        return None if composed is None else self._counted(asked, composed, known)

    def _counted(self, asked: PromptInput, composed: Composed, known: KnownPrefix) -> Composed:
        self.counts.num_healed_turns += known.num_turns
        change = PromptChange(rule=HEALED, num_places=known.num_turns)
        lineage = self._lineage(asked, composed, known)
        changes = (*asked.changes, *composed.changes, change)
        return composed._replace(changes=changes, lineage=lineage)

    def _continued(self, asked: PromptInput, number: int, known: KnownPrefix) -> Composed | None:
        last = known.token_ids[-1]
        is_ended = last in self.eos_token_ids
        for end_id in sorted(self.eos_token_ids, key=lambda one: (one != last, one)):
            seam, _ = self.template.token_text(end_id)
            if (spliced := splice(self.template, asked.prompt, number, seam)) is not None:
                _refuse_lost(asked, spliced.lost)
                text = gone_on(spliced.text, asked.beginning, self.dialect)
                spliced = spliced._replace(text=text)
                # A turn that we ended lacks the marker; it is part of what follows.
                seen = known.token_ids[:-1] if is_ended else known.token_ids
                known = known._replace(token_ids=seen)
                return self._joined(asked, spliced, seam, end_id, known)
        return None

    def _joined(
        self, asked: PromptInput, spliced: Spliced, seam: str, end_id: int, known: KnownPrefix
    ) -> Composed | None:
        """The known tokens, the end marker, and the rest of the text."""
        # The marker is tokenized with what follows it, as some tokens swallow blanks beside them.
        text = seam + spliced.text[spliced.rest_at :]
        if self.template.num_tokens_at_least(text, self.context) > self.context:
            return None
        offset = spliced.rest_at - len(seam)
        first, num_ends = spliced.number + 1, self._num_ends
        marks = marks_of(self.template, spliced.prompt, spliced.text, first, num_ends=num_ends)
        marked = self.template.encode(text, [max(one.at - offset, len(seam)) for one in marks])
        if marked.token_ids[:1] != [end_id]:
            return None
        earlier, later = (
            asked.pictures(part)
            for part in (
                spliced.prompt.messages[: spliced.number + 1],
                spliced.prompt.messages[spliced.number + 1 :],
            )
        )
        packed, shift = known.packed, len(known.token_ids)
        seen, rest = located(packed, earlier), self._hung(marked, later)
        if seen is None or rest is None or shift + len(rest.token_ids) >= self.context:
            return None
        positions = [position + shift for position in rest.positions]
        ends = [*known.ends, *positions] if self.needs_state else []
        keeps = known_keeps(spliced, known) + keeps_at(marks, positions)
        token_ids = [*known.token_ids, *rest.token_ids]
        cut = _cut(token_ids, known.prefix_end, keeps, ends)
        spans = (*seen, *(moved(span, shift) for span in rest.spans))
        packed.extend(rest.token_ids)
        return cut._replace(media=spans, changes=spliced.changes, packed=packed)

    # Without

    def _fresh(self, asked: PromptInput, *, has_head: bool) -> Composed:
        prompt = asked.prompt
        try:
            written = self.template.write(prompt)
        except InvalidRequest as error:
            raise self._naming_refused(asked, error) from error
        _refuse_lost(asked, written.lost)
        text = gone_on(written.text, asked.beginning, self.dialect)
        if (least := self.template.num_tokens_at_least(text, self.context)) > self.context:
            raise ContextTooLong(least, self.context, is_least=True)
        marks = marks_of(self.template, prompt, text, num_ends=self._num_ends)
        head = end_of_head(self.template, prompt, text) if has_head else 0
        varying = varying_at(prompt, text) if self.needs_state else 0
        at = [head, varying, *(one.at for one in marks)] if has_head or marks else []
        marked = self.template.encode(text, at)
        hung = self._hung(marked, asked.pictures(prompt.messages))
        if hung is None:
            message = "The model's chat template does not show all images where they are."
            raise InvalidRequest(message, "messages")
        prefix_end, stable_end, *positions = hung.positions or [0, 0]
        ends = positions if self.needs_state else []
        cut = _cut(hung.token_ids, prefix_end, keeps_at(marks, positions), ends)
        if stable_end:
            boundaries = tuple(sorted({*cut.boundaries, stable_end}))
            cut = cut._replace(boundaries=boundaries, passing=cut.passing - {stable_end})
        return cut._replace(media=hung.spans, changes=written.changes)

    def _naming_refused(self, asked: PromptInput, error: InvalidRequest) -> InvalidRequest:
        """The template's refusal, with the first message that it does not take where it is."""
        prompt, low, high = asked.prompt, 0, len(asked.prompt.messages)
        while low < high - 1:  # it takes the first `low` messages, and not the first `high`
            middle = (low + high) // 2
            beginning = msgspec.structs.replace(prompt, messages=prompt.messages[:middle])
            try:
                self.template.render(beginning, opens_answer=False)
                low = middle
            except InvalidRequest:
                high = middle
        if not high:
            return error
        source = max(asked.parts[high - 1].sources, default=high - 1)
        return InvalidRequest(
            f"{error.message} (at messages[{source}], {asked.sent[source].role})",
            f"messages[{source}]",
        )

    def _hung(self, marked: Marked, media: Sequence[Medium]) -> Placed | None:
        """Tokens with pictures in their places; None where there are more or fewer places."""
        markup = self.template.markup
        if markup is None:
            return None if media else Placed(marked.token_ids, (), marked.positions)
        try:
            return place_media(marked.token_ids, markup.placeholder, media, marked.positions)
        except ValueError:
            return None


def _refuse_lost(asked: PromptInput, lost: Sequence[int]) -> None:
    """Of what was said before, and of what a tool gave, a loss is told; a new question without its
    words would be answered wrongly.
    """
    messages = asked.prompt.messages
    newest = max((n for n, one in enumerate(messages) if one.role == "assistant"), default=-1)
    for number in lost:
        if number > newest and messages[number].role != "tool":
            (source, *_) = asked.parts[number].sources or (number,)
            raise InvalidRequest(
                f"The model's chat template shows nothing of messages[{source}] "
                f"({asked.sent[source].role}), in whatever form it is given.",
                f"messages[{source}]",
            )


def _cut(
    token_ids: list[int],
    prefix_end: int,
    keeps: Sequence[tuple[int, float]],
    ends: Sequence[int],
) -> Composed:
    pinned = sorted({position for position, _ in keeps} | {prefix_end} - {0})[:MAX_BOUNDARIES]
    boundaries = thinned([end for end in ends if end], pinned, MAX_BOUNDARIES)
    passing = frozenset(boundaries[:-1]) - set(pinned)
    return Composed(token_ids, prefix_end, boundaries, passing, tuple(sorted(keeps)))


def _scope(asked: PromptInput) -> TurnScope:
    """By the session's id, or else by how the conversation began, up to the first answer."""
    if asked.asker.session_id is not None:
        return TurnScope(asked.asker)
    roles = [message.role for message in asked.prompt.messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    return TurnScope(asked.asker, asked.links[max(first - 1, 0)], asked.tenant)


def _begun_link(links: Sequence[bytes], beginning: Beginning | None) -> bytes:
    """The digest of a conversation with an answer that its client began; empty without one."""
    if not links or beginning is None:
        return b""
    return advance(links[-1], answer(beginning.text, is_thought=True))


def _edited(asked: PromptInput, known: KnownPrefix) -> int | None:
    """The first message whose thoughts its client gives in other words than they were had."""
    for number, link in enumerate(asked.links):
        message, had = asked.prompt.messages[number], known.thoughts.get(link)
        if had is not None and not is_same_thought(message, had):
            return number
    return None


def _links(
    template: Template, prompt: ChatPrompt, whose: Sequence[object]
) -> tuple[list[bytes], list[bytes]]:
    """The conversation's digests, message by message, under this template and these tools, and
    under whatever tools.

    Those of two tenants are never the same: nobody is answered by what others were. Nor are those
    of two names with other prompt rules.
    """

    def shown(messages: tuple[Message, ...]) -> str:
        small = msgspec.structs.replace(prompt, messages=messages)
        return template.render(small, opens_answer=False)

    try:
        probe = shown(_PROBE)
    except InvalidRequest:
        probe = shown(_PROBE[:1])
    fingerprint, defaults = template.fingerprint, defaults_of(prompt.tools)
    bare = chain(digest(fingerprint, *whose), forms(prompt.messages))
    said = forms(prompt.messages, defaults)
    return chain(digest(fingerprint, probe, *whose), said), bare
