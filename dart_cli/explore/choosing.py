"""What an explorer may do on a screen, and which of it comes next.

    Candidate   one action, with its value and what came of it before
    RANKINGS    which candidate comes first
    text_for    what is typed into a field
    DENIED      words of names that are left alone by default, by what they would do
    DenyList    which word an element's name has; the list with words added or taken off

All see the same screens and candidates: `count` takes what was tried least on this screen, `q` goes by the value of
what may be ahead; the controls: `recency` leaves out what was tried lately, `random` draws among all.

A word counts where a name has it as a whole word, in any case: `pay` is in "Pay now" and "pay-bill", not in
"Payment history". A phrase of several words counts with any space or hyphen between them, or none: `log out` is
in "Logout", too. Fields may be typed into: nothing presses Enter there. An element without a name
cannot be told; where a screen has no tree, nothing can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from bus.error_texts import did_you_mean
from bus.errors import UserError
from dart_cli.algo.action_values import CANDIDATES, Move, shortlist
from envs.contract.elements import Element, Operation

RECENT = 20
"""Newest steps of all slots that `recency` leaves out."""

WORDS = ("hello", "test", "a", "1", "42")
"""Typed where a screen has no words of its own."""

_WORD = re.compile(r"[^\W\d_]{3,16}")


@dataclass(frozen=True)
class Candidate:
    """Something that can be done on the present screen."""

    element: Element
    operation: Operation
    value: float
    tries: int
    age: int | None = None  # steps of all slots since the newest try

    @property
    def move(self) -> Move:
        """Its key on this screen."""
        return self.element.place, self.operation


Ranking = Callable[[Sequence[Candidate], Random], Candidate]
"""Candidates in reading order, at least one -> the one that comes next."""


def by_value(candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """Q-ICRL: a few drawn by softmax of the values, and the best of them."""
    shortlisted = shortlist([candidate.value for candidate in candidates], rng.random)
    return max((candidates[index] for index in shortlisted), key=lambda candidate: candidate.value)


def at_random(candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """Control: without a memory."""
    return rng.sample(candidates, min(CANDIDATES, len(candidates)))[0]


def by_count(candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """Return what was tried least on this screen, whatever came of it."""
    return min(rng.sample(candidates, len(candidates)), key=lambda candidate: candidate.tries)


def by_recency(candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """Control: what was not among the newest steps, at random; if all was, the oldest."""
    mixed = rng.sample(candidates, len(candidates))
    fresh = [candidate for candidate in mixed if candidate.age is None or candidate.age > RECENT]
    return fresh[0] if fresh else max(mixed, key=lambda candidate: candidate.age or 0)


RANKINGS: Mapping[str, Ranking] = {
    "count": by_count,
    "q": by_value,
    "recency": by_recency,
    "random": at_random,
}
"""Values of --chooser."""


def text_for(candidates: Sequence[Candidate], rng: Random) -> str:
    """Return what is typed into a field: a word that the screen shows, or one of WORDS. Never a newline."""
    names = " ".join(candidate.element.name for candidate in candidates)
    names_words: list[str] = _WORD.findall(names)
    return rng.choice([*dict.fromkeys(word.lower() for word in names_words), *WORDS])


# --- what is left alone ------------------------------------------------------------------------

DENIED: Mapping[str, tuple[str, ...]] = {
    "destroys": (
        *("delete", "remove", "erase", "wipe", "discard", "destroy", "uninstall", "overwrite"),
        "forget",
        *("move to trash", "empty trash", "format disk", "format drive", "format partition"),
        *("factory reset", "reset all", "reset everything"),
        *("clear all", "clear data", "clear cache", "clear history", "cancel order"),
    ),
    "spends": (
        *("pay", "buy", "buy now", "purchase", "checkout", "check out", "place order", "order now"),
        *("subscribe", "donate", "transfer", "withdraw"),
    ),
    "tells others": ("send", "publish", "post", "share", "invite", "call", "dial", "tweet"),
    "ends the session": (
        *("log out", "log off", "sign out", "sign off", "quit", "exit", "shut down", "power off"),
        *("restart", "reboot", "hibernate", "suspend", "deactivate", "close account"),
    ),
}

ALL = "all"
"""In place of a word: the whole list."""


class DenyList:
    """Words of names that are left alone."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(dict.fromkeys(" ".join(word.casefold().split()) for word in words))
        parts = (r"[\s\-_]*".join(map(re.escape, word.split())) for word in self.words)
        self._patterns = [
            (word, re.compile(rf"(?<![^\W_]){part}(?![^\W_])", re.IGNORECASE))
            for word, part in zip(self.words, parts, strict=True)
        ]

    def word_of(self, element: Element) -> str:
        """Return the word that keeps an explorer from acting on the element; empty where it may."""
        if element.actions == ("scroll",):
            return ""
        return next((word for word, pattern in self._patterns if pattern.search(element.name)), "")

    def denies(self, element: Element, operation: str) -> bool:
        """Whether this is left alone; typing and scrolling do nothing that a name could warn of."""
        return operation in ("click", "double_click") and bool(self.word_of(element))


def deny_list(add: Iterable[str] = (), allow: Iterable[str] = ()) -> DenyList:
    """Return the default list with words added, and words (or all) taken off. Raises UserError."""
    usual = [word for words in DENIED.values() for word in words]
    off = {" ".join(word.casefold().split()) for word in allow}
    for word in off - {ALL, *usual}:
        raise UserError(
            f"--allow {word!r}: the deny list has no such word{did_you_mean(word, usual)}; "
            "`--dry-run` shows it"
        )
    added = list(add)
    if any(not word.strip() for word in added):
        raise UserError("--deny '': want a word, or a phrase, of the names that are left alone")
    remaining = [] if ALL in off else [word for word in usual if word not in off]
    return DenyList([*remaining, *added])
