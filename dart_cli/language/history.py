"""The history in a prompt: a bounded number of past screenshots, of their texts and of turns.

History       what the next prompt shows of the past
history_of    that of a configuration
Previous      the steps that a prompt no longer shows, as lines of text
previous_of   those of a configuration
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bus.messages import Turn
from dart_cli.config.families import FAMILIES
from dart_cli.config.schema import PolicyConfig


@dataclass(frozen=True)
class History:
    """Keeps the completions of the last `turns` turns, and the newest screenshots and texts among them.

    `images` counts the current screenshot, which is not a turn: at most `images - 1` past screenshots
    are kept, and likewise `texts - 1` texts that were beside one. The paper's setting is images 5,
    turns 35 (arXiv 2509.23866).

    With `images_most` 0 this holds for every prompt: the window slides. With another number it holds after
    an eviction. Nothing is dropped until a prompt would show more than `images_most` screenshots, so that
    each prompt until then extends the one before.
    """

    images: int
    turns: int
    texts: int = 1
    images_most: int = 0

    def __post_init__(self) -> None:
        if self.images < 1 or self.turns < 0 or self.texts < 1:
            raise ValueError(f"history needs images >= 1, turns >= 0 and texts >= 1, got {self}")
        if self.images_most and self.images_most <= self.images:
            raise ValueError(f"history needs images_most > images, or 0, got {self}")

    @property
    def evicts(self) -> bool:
        """Whether prompts extend one another until an eviction."""
        return self.images_most > 0

    def visible(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns that go into the next prompt, oldest first.

        `turns` is the whole past, or what was visible for the prompt before and the turn since: the
        result is the same. With evictions, a turn without a screenshot must be one that lost it here.
        """
        if not self.evicts:
            return self._newest(turns)
        kept: list[Turn] = []
        shown = 1  # the current screenshot
        for turn in turns:
            kept.append(turn)
            shown += turn.screenshot is not None
            if shown > self.images_most:
                kept = self._newest(kept)
                shown = 1 + sum(each.screenshot is not None for each in kept)
        return kept

    def _newest(self, turns: Sequence[Turn]) -> list[Turn]:
        kept = turns[max(0, len(turns) - self.turns) :]
        return [self._faded(turn, len(kept) - place) for place, turn in enumerate(kept)]

    def _faded(self, turn: Turn, age: int) -> Turn:
        """Return the turn of `age` steps ago, 1 for the newest, without what is too old."""
        lost: dict[str, object] = {"screenshot": None} if age >= self.images else {}
        if age >= self.texts and turn.observed_text:
            lost["observed_text"] = ""
        return turn.model_copy(update=lost) if lost else turn


HISTORY_TEXTS = 1
"""Screens whose texts (`env.observe`) are in a prompt: the current one alone. An accessibility tree may have 8000
characters, more than the screenshot beside it has tokens, and it lists anew what has not changed."""


def history_of(policy: PolicyConfig) -> History:
    """Return the history of a configuration whose [policy] has no mistake (config/rules/policy.py)."""
    most = policy.history_images_most
    return History(policy.history_images, policy.history_turns, HISTORY_TEXTS, most)


PREVIOUS = "{previous}"
"""Where `policy.template` has the steps whose turns are no longer shown."""


@dataclass(frozen=True)
class Previous:
    """Writes them, as a family is used to it: `line` for each, with {step}, from 1, and {action}; `none` where there is none."""

    line: str = "Step {step}: {action}\n"
    none: str = "None"

    def text(self, actions: Sequence[str]) -> str:
        """Return the lines of these steps [N], oldest first; a newline that ends the last is left out."""
        if not actions:
            return self.none
        lines = [
            self.line.replace("{step}", str(number)).replace("{action}", action)
            for number, action in enumerate(actions, start=1)
        ]
        return "".join(lines).removesuffix("\n")


def previous_of(policy: PolicyConfig) -> Previous | None:
    """Return how a configuration tells the steps before; None where its template does not show them."""
    if PREVIOUS not in policy.template:
        return None
    family = FAMILIES.get(policy.family)
    return Previous(family.previous_line, family.previous_none) if family else Previous()
