"""Thoughts: what a model that reasons writes before its reply, in <think> or <thinking> tags.

opens_thought   whether a prompt ends within a thought, so that the completion begins there
closes_thought  whether a thought ends in a text
closed_thought  a thought as a model learns to write it after such a prompt
unopened        a text without the tag that such a prompt has already
reply_starts    where the reply may begin in a completion: markup is looked for in no thought
reply_of        the reply alone
"""

from __future__ import annotations

import re

from bus.errors import ActionError

_TAGS = re.compile(r"<(?=/?think(?:ing)?>)")
_BEGIN = re.compile(r"\s*<(think(?:ing)?)>\n?")
_OPEN = re.compile(r"<think(?:ing)?>(?!.*</think(?:ing)?>)", re.DOTALL)
_CLOSE = re.compile(r"</think(?:ing)?>\s*")


def opens_thought(beginning: str) -> bool:
    """Return True if the last thought that the text begins does not end in it."""
    return _OPEN.search(beginning) is not None


def closes_thought(text: str) -> bool:
    """Return True if a thought ends in the text."""
    return _CLOSE.search(text) is not None


def closed_thought(thought: str, beginning: str) -> str:
    """Return the thought and its end, as they follow `beginning`; "" if that opens no thought.

    A tag of thoughts within the thought loses its <.
    """
    if not opens_thought(beginning):
        return ""
    tag = "thinking" if "<thinking>" in beginning else "think"
    return f"{_TAGS.sub('', thought)}\n</{tag}>\n\n"


def unopened(text: str, beginning: str) -> str:
    """Return the text as it follows `beginning`, which may open the thought that the text opens."""
    begun = _BEGIN.match(text) if opens_thought(beginning) else None
    return text[begun.end() :] if begun else text


def reply_starts(text: str) -> list[int]:
    """Return where the reply may begin, the most likely place last.

    A text that begins with thoughts has a place after each of them. The prompt may have begun the thought, so
    that its end alone is in the text; but that may also be a part of what the reply types, so that the text itself
    may be the reply. Raises ActionError if the thought that begins the text does not end.
    """
    starts: list[int] = []
    while begun := _BEGIN.match(text, starts[-1] if starts else 0):
        ended = re.compile(rf"</{begun[1]}>\s*").search(text, begun.end())
        if ended is None:
            break
        starts.append(ended.end())
    if starts:
        return starts
    if begun:
        raise ActionError("the thought that begins the completion does not end")
    ended = _CLOSE.search(text)
    return [0] if ended is None else [0, ended.end()]


def reply_of(text: str) -> str:
    """Return the text after its thought, if there is one. Raises ActionError as `reply_starts` does."""
    return text[reply_starts(text)[-1] :]
