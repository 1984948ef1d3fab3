"""The choice of an explorer's next action, and the elements that it leaves alone.

    Candidate   one action on the present screen, with its value and its earlier tries
    RANKINGS    the functions that choose the next candidate, by the value of --chooser
    text_for    the text that is typed into a field
    DENIED      the default words of the deny list, by what their buttons would do
    DenyList    the elements that are left alone, by words in their names
    deny_list   the default list, with words added or removed

All choosers see the same screens and candidates. `count` takes the action that was tried least on this
screen, `q` the one with the best value of what may follow. The controls are `recency`, which leaves out
what was tried recently, and `random`, which draws among all.

A word matches a whole word of a name, in any case: `pay` is in "Pay now" and "pay-bill", not in "Payment
history". The words of a phrase may have spaces, hyphens or nothing between them: `log out` is in "Logout"
too. Typing into a field is always allowed, since nothing presses Enter there. Elements without names are
never denied, so the list has no effect on a screen without a tree.
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
"""The number of newest steps, over all slots, whose actions `recency` leaves out."""

WORDS = ("hello", "test", "a", "1", "42")
"""Texts that are typed beside the words of the screen itself."""

_WORD = re.compile(r"[^\W\d_]{3,16}")


@dataclass(frozen=True)
class Candidate:
    """An action that is possible on the present screen."""

    element: Element
    operation: Operation
    value: float
    tries: int
    age: int | None = None  # steps of all slots since the newest try; None if never tried

    @property
    def move(self) -> Move:
        """The key of the action on this screen."""
        return self.element.place, self.operation


Ranking = Callable[[Sequence[Candidate], Random], Candidate]
"""Chooses the next of some candidates, at least one, in reading order."""


def by_value(candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """Draw a few candidates by the softmax of their values, and return the best of them (Q-ICRL)."""
    shortlisted = shortlist([candidate.value for candidate in candidates], rng.random)
    return max((candidates[index] for index in shortlisted), key=lambda candidate: candidate.value)


def at_random(candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """Return any candidate: a control without a memory."""
    return rng.sample(candidates, min(CANDIDATES, len(candidates)))[0]


def by_count(candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """Return a candidate that was tried least on this screen, whatever its outcome."""
    return min(rng.sample(candidates, len(candidates)), key=lambda candidate: candidate.tries)


def by_recency(candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """Return any candidate that is not among the newest steps, or the oldest one if all are: a control."""
    mixed = rng.sample(candidates, len(candidates))
    fresh = [candidate for candidate in mixed if candidate.age is None or candidate.age > RECENT]
    return fresh[0] if fresh else max(mixed, key=lambda candidate: candidate.age or 0)


RANKINGS: Mapping[str, Ranking] = {
    "count": by_count,
    "q": by_value,
    "recency": by_recency,
    "random": at_random,
}
"""Value of --chooser -> its ranking."""


def text_for(candidates: Sequence[Candidate], rng: Random) -> str:
    """Return a text to type into a field: a word that the screen shows, or one of WORDS; never a newline."""
    names = " ".join(candidate.element.name for candidate in candidates)
    shown_words: list[str] = _WORD.findall(names)
    return rng.choice([*dict.fromkeys(word.lower() for word in shown_words), *WORDS])


# --- the deny list -----------------------------------------------------------------------------

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
"""The value of --allow that removes the whole list."""


class DenyList:
    """The words whose elements an explorer leaves alone."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(dict.fromkeys(" ".join(word.casefold().split()) for word in words))
        parts = (r"[\s\-_]*".join(map(re.escape, word.split())) for word in self.words)
        self._patterns = [
            (word, re.compile(rf"(?<![^\W_]){part}(?![^\W_])", re.IGNORECASE))
            for word, part in zip(self.words, parts, strict=True)
        ]

    def word_of(self, element: Element) -> str:
        """Return the word by which the element is left alone; empty if there is none."""
        if element.actions == ("scroll",):
            return ""
        return next((word for word, pattern in self._patterns if pattern.search(element.name)), "")

    def denies(self, element: Element, operation: str) -> bool:
        """Return True if this action is left alone.

        Typing and scrolling never are, since they trigger nothing.
        """
        return operation in ("click", "double_click") and bool(self.word_of(element))


def deny_list(add: Iterable[str] = (), allow: Iterable[str] = ()) -> DenyList:
    """Return the default list with words added and words (or all) removed. Raises UserError."""
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
