"""What the application of an environment reports during an episode: console errors, failed requests.

reported_lines   the texts in info["app_log"] of one call, bounded
AppLog           the lines of one episode, each with its step, bounded
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from bus.messages import APP_LOG_LINES, APP_LOG_WIDTH
from envs.contract.methods import wrong_return

INFO_KEY = "app_log"
LEFT_OUT = "further lines are left out"
_LONGEST = APP_LOG_WIDTH - 40  # characters of a text; the rest is for its step and number


def reported_lines(call: str, info: object) -> list[str]:
    """Return the texts in info["app_log"], one line each, at most one more than an episode's log has.

    Equal texts are one line with their number. Raises EnvError if the value is neither missing nor a list of
    texts.
    """
    texts: Any = info.get(INFO_KEY) if isinstance(info, Mapping) else None
    if texts is None:
        return []
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise wrong_return(call, f"a list of texts as info[{INFO_KEY!r}]", texts)
    numbers = Counter(map(_one_line, texts))
    return [
        f"{text} ({number} times)" if number > 1 else text
        for text, number in islice(numbers.items(), APP_LOG_LINES + 1)
    ]


class AppLog:
    """The lines of one episode, in order: the first `APP_LOG_LINES`, and a note if there were more."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, call: str, lines: Sequence[str]) -> None:
        """Add the lines of one call, e.g. "step 3"."""
        self.lines += [f"{call}: {line}" for line in lines]
        if len(self.lines) > APP_LOG_LINES:
            self.lines[APP_LOG_LINES:] = [LEFT_OUT]


def _one_line(text: str) -> str:
    """Return a text as one line of bounded length, without characters that steer a terminal."""
    words = " ".join(text[: 2 * APP_LOG_WIDTH].split())
    line = "".join(character if character.isprintable() else "?" for character in words)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
