"""The prompt of the policy: instruction, visible turns and the present screen, as token ids.

    PromptRenderer.render            renders a RenderedPrompt: token ids with all placeholders, and the images
    PromptRenderer.render_messages   renders the messages of another program, and adds nothing to them
    PromptRenderer.chat              returns the messages for a server that has the chat template itself
    make_renderer                    makes the renderer of a configuration
    part_order_of                    returns where the prompts of a configuration have the instruction
    date_of                          writes a date as prompts tell it
    template_options                 returns the options of the chat template that a configuration sets

The tokenizer's chat template builds the text. The instruction comes first. Each past turn is an assistant
message, after the part of its screen that the history keeps. The present screen is last. A family of models
may be used to texts around these screens (ScreenTexts).

A past completion consists of the tokens that were sampled. They follow what the template had put before the
reply, such as the opening tag of a thought. A text whose tokens are unknown is encoded by itself and takes
the same place. If the policy points, the points of such a text become pointers.

Text from outside (instructions, the text of a screen, completions whose tokens are unknown) is only text: a
special token that it spells is encoded as plain characters.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from bus.errors import ModelError, PromptError
from bus.messages import ActRequest, ChatMessage, ChatPart, Turn
from dart_cli.chat.server import Messages as ChatMessages
from dart_cli.config.schema import PolicyConfig
from dart_cli.language.history import PREVIOUS, SCREEN, ScreenTexts, screen_texts_of
from dart_cli.language.parsers import point_parser
from dart_cli.language.pointer_text import PointerText
from dart_cli.language.thoughts import (
    closed_thought,
    closes_thought,
    drop_opening_tag,
    opens_thought,
)
from dart_cli.language.vocabulary import CUT, SLOT
from dart_cli.policy.images import with_hashes
from dart_cli.policy.loader import LoadedPolicy

PartOrder = Literal["separate", "instruction_first", "image_first"]

_IMAGE = {"type": "image"}
_TRIAL: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "1"}]}
"""A message of the user, to try a template with."""
_RESULT: dict[str, Any] = {
    "role": "user",
    "content": [{"type": "text", "text": "<tool_response>\n1\n</tool_response>"}],
}
"""A message with what a tool returned. Qwen3.5's template begins the replies before one differently from those
before a message of the user."""
_LONGEST = 100
"""The most characters of a special token."""
INSTRUCTION, DATE = "{instruction}", "{date}"
"""The places in `policy.template` and `policy.system_prompt` for the task, and for `policy.date`."""
_BESIDE = re.compile(
    r"(?<=\S)(?=\{(?:instruction|previous)\})|(?:(?<=\{instruction\})|(?<=\{previous\}))(?=\S)"
)
"""Where an instruction could complete a special token that the template's text begins or ends."""
_FIELD = re.compile(r"\{(?:instruction|previous)\}")
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt that an engine can take."""

    token_ids: list[int]  # [P], one placeholder per image token
    images: list[bytes]  # [I], encoded, in the order of their placeholders


@dataclass(frozen=True)
class _Reply:
    """A past completion in a prompt; hashable."""

    text: str
    token_ids: tuple[int, ...]  # [A], without the end token; () if only the text is known
    is_sampled: bool  # False if the tokens were made from a text


@dataclass(frozen=True)
class _Past:
    """What a prompt shows of one past turn; hashable."""

    reply: _Reply
    has_image: bool
    observed_text: str


@dataclass(frozen=True)
class _Beginning:
    """The text that a chat template writes between a message and its reply."""

    newest: str  # before the reply that is to be sampled
    past: tuple[str, ...]  # the texts before past replies, the longest first

    def restore(self, before: str, reply: _Reply) -> str:
        """Return the text `before` a past reply as it was when the reply was sampled.

        The template writes one of `past` there; `newest` takes its place. A text that closes no thought was
        not written in one, and a closed empty thought goes before it. Raises PromptError if `before` ends
        with none of `past`.
        """
        past = next((text for text in self.past if before.endswith(text)), None)
        if past is None:
            raise PromptError("the chat template begins past replies in several ways")
        began_with_newest = reply.is_sampled or closes_thought(reply.text)
        if began_with_newest or not opens_thought(self.newest):
            return before[: len(before) - len(past)] + self.newest
        return before + closed_thought("", past)


def part_order_of(policy: PolicyConfig) -> PartOrder:
    """Return `policy.part_order`; `auto` is the order that models of the action parser were trained on."""
    if policy.part_order != "auto":
        return policy.part_order
    if policy.action_parser == "uitars":
        return "separate"
    # If turns outlive their screens, no image can stay before the instruction.
    keeps_images = policy.history_turns < policy.history_images
    return (
        "image_first" if policy.action_parser == "compact" and keeps_images else "instruction_first"
    )


def date_of(policy: PolicyConfig) -> str:
    """Return `policy.date` in words, such as `Saturday, November 28, 2026`, in any locale."""
    date = dt.date.fromisoformat(policy.date)
    return f"{_WEEKDAYS[date.weekday()]}, {_MONTHS[date.month - 1]} {date.day:02}, {date.year}"


def template_options(policy: PolicyConfig) -> dict[str, Any]:
    """Return the options of the chat template that a configuration sets."""
    thinking = {} if policy.thinking == "auto" else {"enable_thinking": policy.thinking == "on"}
    effort = {"reasoning_effort": policy.reasoning_effort} if policy.reasoning_effort else {}
    return thinking | effort


def make_renderer(policy: LoadedPolicy, config: PolicyConfig) -> PromptRenderer:
    """Return the renderer of a configuration's prompts.

    Raises ConfigError if the policy points and its action parser cannot find points in a text. Raises
    ModelError if the model's chat template refuses its options, if it cannot show a past turn as it was
    sampled, or if `policy.history_images_most` needs each prompt to extend the one before and the template
    prevents it.
    """
    screens = screen_texts_of(config)
    if config.history_images_most:  # a past screen keeps the text with which it was new
        screens = replace(screens, past=screens.newest)
    date = date_of(config)
    renderer = PromptRenderer(
        policy,
        config.system_prompt.replace(DATE, date),
        config.template.replace(DATE, date),
        part_order_of(config),
        pointer_text(policy, config.action_parser, config.max_actions),
        screens,
        template_options(config),
    )
    if problem := renderer.option_problem():
        raise ModelError(
            f"{policy.folder}: {problem}; set policy.thinking and policy.reasoning_effort to what its chat "
            "template has, or leave them out"
        )
    if config.history_turns and (problem := renderer.past_problem()):
        raise ModelError(
            f"{policy.folder}: past turns cannot be shown as they were sampled: {problem}; fix its chat "
            "template, or set policy.history_turns to 0"
        )
    if config.history_images_most and (problem := renderer.extension_problem()):
        raise ModelError(
            f"{policy.folder}: policy.history_images_most cannot be used: {problem}; set it to 0"
        )
    return renderer


def pointer_text(
    policy: LoadedPolicy, action_parser: str, max_actions: int = 1
) -> PointerText | None:
    """Return the PointerText of a policy that points, or None for a policy that writes numbers."""
    if policy.pointer is None or policy.pointing != "pointer":
        return None

    def encode(text: str) -> list[int]:
        return policy.encode(policy.literal.mark(text))

    parser = point_parser(action_parser, max_actions)
    return PointerText(parser, policy.pointer, encode, policy.decode)


class PromptRenderer:
    """Renders the prompts of one policy.

    `system` is the system message, empty for none. `template` is the text around the instruction, which
    replaces `{instruction}` in both; the steps that are no longer shown replace `{previous}`. `part_order`
    puts the instruction into a separate message, or into the message of the first screen, before or after its
    image. `points` converts between texts and pointers if the policy points. `screens` are the texts around
    all screens but the one in the message of the instruction. `options` go to the chat template.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        system: str = "",
        template: str = "{instruction}",
        part_order: PartOrder = "image_first",
        points: PointerText | None = None,
        screens: ScreenTexts = ScreenTexts(),  # noqa: B008 - frozen
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.points = points
        self._policy = policy
        self._system = _BESIDE.sub(CUT, system)
        self._template = _BESIDE.sub(CUT, template)
        self._screens = screens
        self._options = dict(options or {})
        self._part_order = part_order
        self._unsampled = policy.absent_token_ids | set(policy.end_token_ids)
        self._vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])
        self._tokenise = lru_cache(maxsize=4096)(self._tokenise_uncached)

    def render(
        self,
        instruction: str,
        turns: Sequence[Turn],
        screenshot: bytes,
        image_hashes: Sequence[str] = (),
        observed_text: str = "",
        previous: str = "",
    ) -> RenderedPrompt:
        """Return a prompt of token ids [P] and images [I]; `image_hashes` [I] are their hashes, or empty.

        `previous` describes the steps before `turns`, for templates that show them. Raises PromptError if a
        screenshot is not an image, or if a turn has tokens that are never sampled.
        """
        images = [turn.screenshot for turn in turns if turn.screenshot is not None]
        images.append(screenshot)
        # A text beside a screen is long and hardly ever repeated, so caching it would waste memory.
        is_long = observed_text or previous or any(turn.observed_text for turn in turns)
        tokenise = self._tokenise_uncached if is_long else self._tokenise
        compact = tokenise(instruction, tuple(map(self._past, turns)), observed_text, previous)
        return self._expanded(compact, images, image_hashes)

    def chat(self, request: ActRequest) -> ChatMessages:
        """Return the prompt as messages of plain text and images, past replies as they were written."""
        images = iter(
            [turn.screenshot for turn in request.turns if turn.screenshot is not None]
            + [request.screenshot]
        )
        replies = iter(turn.text for turn in request.turns)
        messages = self._messages(
            request.instruction,
            tuple(map(self._past, request.turns)),
            request.observed_text,
            request.previous,
        )

        def part(part: dict[str, str]) -> str | bytes:
            return next(images) if part == _IMAGE else part["text"].replace(CUT, "")

        chat: ChatMessages = []
        for message in messages:
            content = message["content"]
            if content == SLOT:
                chat.append(("assistant", [next(replies)]))
            elif isinstance(content, str):
                chat.append((message["role"], [content.replace(CUT, "")]))
            else:
                parts = [part(each) for each in content]
                chat.append((message["role"], [each for each in parts if each] or [""]))
        return chat

    def closed_thought(self, thought: str = "") -> str:
        """Return the thought and its closing tag, with which a learned reply begins after an opened thought.

        If prompts do not end within a thought, return "": the action parser then writes the thought.
        """
        return closed_thought(thought, self._newest)

    def render_messages(
        self,
        messages: Sequence[ChatMessage],
        images: Sequence[bytes],
        image_hashes: Sequence[str] = (),
    ) -> RenderedPrompt:
        """Return a prompt of these messages alone, with images [I] in the place of the parts that are images.

        `system` and `template` are not used. Raises PromptError as `render` does.
        """
        chat = list(map(self._chat, messages))
        replies = [
            self._reply(_joined(message.parts), message.token_ids)
            for message in messages
            if message.role == "assistant"
        ]
        image_parts = sum(part.is_image for message in messages for part in message.parts)
        if image_parts != len(images):
            raise PromptError(f"messages with {image_parts} images come with {len(images)}")
        compact = self._encoded(chat, replies, len(images))
        return self._expanded(compact, images, image_hashes)

    def _expanded(
        self, compact: Sequence[int], images: Sequence[bytes], image_hashes: Sequence[str]
    ) -> RenderedPrompt:
        """Return the prompt of `compact`, whose one placeholder per image becomes as many as it needs."""
        token_ids: list[int] = []
        remaining = iter(with_hashes(images, image_hashes))
        for token in compact:
            if token == self._policy.image_token_id:
                token_ids += [token] * self._policy.images.token_count(*next(remaining))
            else:
                token_ids.append(token)
        return RenderedPrompt(token_ids, list(images))

    def option_problem(self) -> str:
        """Return why the chat template refuses its options; "" if it takes them, or if there are none."""
        try:
            if self._options:
                self._templated([_TRIAL])
        except PromptError as error:
            return str(error)
        return ""

    def past_problem(self) -> str:
        """Return why past turns cannot be shown as they were sampled; "" if they can."""
        turn, reply = {"role": "assistant", "content": SLOT}, self._sampled_turn(False).reply
        try:
            self._encoded([_TRIAL, turn, _TRIAL, turn, _TRIAL], [reply, reply], 0)
        except PromptError as error:
            return str(error)
        return ""

    def _sampled_turn(self, has_image: bool) -> _Past:
        """Return a past turn to try a template with."""
        reply = _Reply("1", tuple(self._policy.encode("1")), is_sampled=True)
        return _Past(reply, has_image, "")

    def extension_problem(self) -> str:
        """Return why a prompt does not extend the previous prompt and its completion; "" if it does.

        Some templates drop what they add to the newest message (the start of a thought), or end a message
        with a token that the model does not sample.
        """
        with_image, without_image = map(self._sampled_turn, (True, False))
        sampled = with_image.reply.token_ids
        starts: tuple[tuple[_Past, ...], ...] = ((), (without_image,))  # also as after an eviction
        for turns in starts:
            for _ in range(2):
                try:
                    before = (*self._tokenise_uncached("1", turns, ""), *sampled)
                    turns = (*turns, with_image)
                    after = self._tokenise_uncached("1", turns, "")
                except PromptError as error:
                    return str(error)
                if after[: len(before)] != before:
                    return "the chat template shows a past message differently from the newest"
                if after[len(before)] not in self._policy.end_token_ids:
                    return "the chat template ends messages with a token that ends no completion"
        return ""

    def _past(self, turn: Turn) -> _Past:
        reply = self._reply(turn.text, turn.token_ids)
        return _Past(reply, turn.screenshot is not None, turn.observed_text)

    def _reply(self, text: str, token_ids: list[int]) -> _Reply:
        """Return a past completion for a prompt. Raises PromptError for tokens that are never sampled."""
        is_sampled = bool(token_ids)
        if not is_sampled:
            # Agents of other programs may pass the whole message, with the tag that the prompt has already.
            text = drop_opening_tag(text, self._newest)
            if self.points is not None and (pointed := self.points.read(text)).points:
                token_ids = pointed.token_ids
        if token_ids and token_ids[-1] in self._policy.end_token_ids:
            token_ids = token_ids[:-1]  # the template ends the message
        is_in_vocabulary = all(0 <= token < self._vocabulary for token in token_ids)
        if not is_in_vocabulary or not self._unsampled.isdisjoint(token_ids):
            raise PromptError("a past turn has tokens that this model never samples")
        return _Reply(text, tuple(token_ids), is_sampled)

    @cached_property
    def _newest(self) -> str:
        """The text that the template writes between the last message and the reply to sample."""
        chat = [_TRIAL]
        return self._templated(chat).removeprefix(self._templated(chat, ends=True))

    @cached_property
    def _beginning(self) -> _Beginning:
        """The texts that the template writes before past and new replies.

        Raises PromptError if the template shows the message before a past reply differently from the newest
        one.
        """
        message = self._templated([_TRIAL], ends=True)
        turn = {"role": "assistant", "content": SLOT}
        chats = [self._templated([_TRIAL, turn, after]) for after in (_TRIAL, _RESULT)]
        before = [chat.partition(SLOT)[0] for chat in chats]
        if not all(text.startswith(message) for text in (*before, self._templated([_TRIAL]))):
            raise PromptError("the chat template shows a past message differently from the newest")
        past = sorted({text.removeprefix(message) for text in before}, key=len, reverse=True)
        return _Beginning(self._newest, tuple(past))

    def _chat(self, message: ChatMessage) -> dict[str, Any]:
        """Return one message as chat templates take it."""
        if message.role == "assistant":
            return {"role": "assistant", "content": SLOT}
        if message.role != "user":
            return {
                "role": message.role,
                "content": self._policy.literal.mark(_joined(message.parts)),
            }
        content: list[dict[str, str]] = []
        before = ""  # the end of the text that this part continues
        for part in message.parts:
            if part.is_image:
                content.append(_IMAGE)
                before = ""
            else:
                content.append(_text(self._continued(before, part.text)))
                before = (before + part.text)[-_LONGEST:]
        return {"role": "user", "content": content}

    def _continued(self, before: str, text: str) -> str:
        """Return `text`, marked so that it completes no special token that the end of `before` begins."""
        mark = self._policy.literal.mark
        plain = mark(text)
        return plain if mark(before + text) == mark(before) + plain else CUT + plain

    def _messages(
        self, instruction: str, turns: Sequence[_Past], observed_text: str, previous: str
    ) -> list[dict[str, Any]]:
        """Return the messages of a prompt, with a SLOT in place of each past reply."""
        mark = self._policy.literal.mark
        values = {INSTRUCTION: mark(instruction), PREVIOUS: mark(previous)}
        system, template = (
            _FIELD.sub(lambda match: values[match[0]], text)
            for text in (self._system, self._template)
        )
        messages: list[dict[str, Any]] = []
        if system:
            messages.append({"role": "system", "content": system})
        opening = [_text(template)] if template else []
        before, after = opening, []  # the parts around the next screen
        if self._part_order == "separate":
            if opening:
                messages.append({"role": "user", "content": opening})
            before = []
        elif self._part_order == "image_first":
            before, after = [], opening
        for turn in turns:
            screen = _screen(turn.has_image, mark(turn.observed_text))
            if not before + after:
                screen = self._around(screen, turn.has_image, self._screens.past)
            if (parts := before + screen + after) or self._screens.dropped is not None:
                messages.append({"role": "user", "content": parts})
            messages.append({"role": "assistant", "content": SLOT})
            before, after = [], []
        screen = _screen(True, mark(observed_text))
        if not before + after:
            screen = self._around(screen, True, self._screens.newest)
        messages.append({"role": "user", "content": before + screen + after})
        return messages

    def _around(
        self, screen: list[dict[str, str]], has_image: bool, text: str
    ) -> list[dict[str, str]]:
        """Return the parts of a screen with `text` around them, or with what stands for a dropped image."""
        if not has_image:
            return ([_text(self._screens.dropped)] if self._screens.dropped else []) + screen
        begin, _, end = text.partition(SCREEN)
        return [*([_text(begin)] if begin else []), *screen, *([_text(end)] if end else [])]

    def _tokenise_uncached(
        self, instruction: str, turns: tuple[_Past, ...], observed_text: str, previous: str = ""
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt with one placeholder per image."""
        return self._encoded(
            self._messages(instruction, turns, observed_text, previous),
            [turn.reply for turn in turns],
            1 + sum(turn.has_image for turn in turns),
        )

    def _encoded(
        self, messages: list[dict[str, Any]], replies: Sequence[_Reply], expected: int
    ) -> tuple[int, ...]:
        """Return the token ids of messages, with `replies` in place of the SLOTs and a placeholder per image.

        Raises PromptError if the template drops replies, or does not write `expected` placeholders.
        """
        *parts, last = self._templated(messages).split(SLOT)
        if len(parts) != len(replies):
            raise PromptError(
                f"the prompt shows {len(parts)} of {len(replies)} past completions; "
                "does the chat template drop or change them?"
            )
        encode, mark = self._policy.encode, self._policy.literal.mark
        token_ids: list[int] = []
        for part, reply in zip(parts, replies, strict=True):
            token_ids += encode(self._beginning.restore(part, reply))
            has_tokens = reply.is_sampled or reply.token_ids
            token_ids += reply.token_ids if has_tokens else encode(mark(reply.text))
        token_ids += encode(last)
        placeholders = token_ids.count(self._policy.image_token_id)
        if placeholders != expected:
            raise PromptError(
                f"the prompt has {placeholders} image placeholders for {expected} images; "
                "does policy.template or policy.system_prompt contain the image token, "
                "or does the chat template drop images?"
            )
        return tuple(token_ids)

    def _templated(self, messages: list[dict[str, Any]], *, ends: bool = False) -> str:
        """Return messages as the chat template writes them, with the beginning of a reply unless `ends`."""
        try:
            text = self._policy.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not ends, **self._options
            )
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "jinja2":
                raise
            raise PromptError(f"the model's chat template refuses the messages: {error}") from None
        return str(text)


def _joined(parts: Sequence[ChatPart]) -> str:
    return "".join(part.text for part in parts)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _screen(has_image: bool, observed_text: str) -> list[dict[str, str]]:
    """Return the parts of one screen. CUTs keep its text from forming a special token with the next text."""
    image = [_IMAGE] if has_image else []
    return [*image, _text(f"{CUT}\n{observed_text}\n{CUT}")] if observed_text else image
