"""Thoughts, which a reasoning model writes before its reply, in <think> or <thinking> tags.

opens_thought     tells whether a prompt ends within a thought, so that the completion begins there
closes_thought    tells whether a text has the end of a thought
closed_thought    returns a thought as a model learns to write it after a prompt that ends within a thought
drop_opening_tag  removes the opening tag from a completion whose prompt has the tag already
reply_starts      returns where the reply may begin in a completion, since markup in a thought is not read
reply_of          returns the reply of a completion, without its thought
thought_and_words returns the thought of a completion, and the words before its call, in any action language
"""

from __future__ import annotations

import json
import re

from bus.errors import ActionError

_TAGS = re.compile(r"<(?=/?think(?:ing)?>)")
_BEGIN = re.compile(r"\s*<(think(?:ing)?)>\n?")
_OPEN = re.compile(r"<think(?:ing)?>(?!.*</think(?:ing)?>)", re.DOTALL)
_CALL = re.compile(
    r"<tool_call>|<action>|```|<\|begin_of_box\|>|^(?:Action:[ \t]*)?[a-z_+]+\(", re.MULTILINE
)
"""Where a call begins, in the action languages of dart_cli/language/parsers."""
_LABEL = re.compile(
    r"^\s*#*\s*(?:Thought|Action|Code|Step \d+):[ \t]*|</?operation>", re.MULTILINE | re.IGNORECASE
)
"""The names of sections before a call."""
_CLOSE = re.compile(r"</think(?:ing)?>\s*")


def opens_thought(beginning: str) -> bool:
    """Return True if the last thought that `beginning` opens is not closed in it."""
    return _OPEN.search(beginning) is not None


def closes_thought(text: str) -> bool:
    """Return True if the text has the end of a thought."""
    return _CLOSE.search(text) is not None


def closed_thought(thought: str, beginning: str) -> str:
    """Return the thought and its closing tag, which follow `beginning`; "" if `beginning` opens no thought.

    Tags of thoughts within the thought lose their <.
    """
    if not opens_thought(beginning):
        return ""
    tag = "thinking" if "<thinking>" in beginning else "think"
    return f"{_TAGS.sub('', thought)}\n</{tag}>\n\n"


def drop_opening_tag(text: str, beginning: str) -> str:
    """Return the text without its opening tag of a thought, if `beginning` has opened the thought already."""
    tag = _BEGIN.match(text) if opens_thought(beginning) else None
    return text[tag.end() :] if tag else text


def reply_starts(text: str) -> list[int]:
    """Return the places where the reply may begin, the most likely one last.

    A text that begins with thoughts has a place after each of them. If the prompt has opened the thought,
    only the closing tag is in the text. A closing tag may also be a part of a text that the reply types, so
    the beginning of the text is a place, too. Raises ActionError if the thought that begins the text does not
    end.
    """
    starts: list[int] = []
    while opening := _BEGIN.match(text, starts[-1] if starts else 0):
        closing = re.compile(rf"</{opening[1]}>\s*").search(text, opening.end())
        if closing is None:
            break
        starts.append(closing.end())
    if starts:
        return starts
    if opening:
        raise ActionError("the thought that begins the completion does not end")
    closing = _CLOSE.search(text)
    return [0] if closing is None else [0, closing.end()]


def reply_of(text: str) -> str:
    """Return the text after its thought, if there is one. Raises ActionError as `reply_starts` does."""
    return text[reply_starts(text)[-1] :]


def thought_and_words(text: str) -> tuple[str, str]:
    """Return (thought, words): the thought in its tags, and what the reply says before its call.

    Either may be empty. The names of sections, such as `Thought:`, are left out.
    """
    try:
        start = reply_starts(text)[-1]
    except ActionError:
        return "", ""
    reply = text[start:]
    call = _CALL.search(reply)
    words = _LABEL.sub("", reply[: call.start()]) if call else ""
    if reply.lstrip().startswith("{"):
        words = _in_object(reply)
    thought = re.sub(r"</?think(?:ing)?>", "", text[:start])
    return thought.strip(), re.sub(r"\n\s*\n", "\n", words).strip()


def _in_object(reply: str) -> str:
    """Return the `thought` of a reply that is a JSON object; "" if it has none."""
    try:
        thought = json.loads(reply).get("thought")
    except (ValueError, RecursionError, AttributeError):
        return ""
    return thought if isinstance(thought, str) else ""
