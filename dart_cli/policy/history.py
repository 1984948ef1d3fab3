"""The history in a prompt: a bounded number of past screenshots and of turns of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bus.messages import Turn


@dataclass(frozen=True)
class History:
    """Keeps the text of the last `turns` turns, and the newest screenshots among them.

    `images` counts the current screenshot, which is not a turn: at most
    `images - 1` past screenshots are kept. The paper's setting is images 5, turns 35 (arXiv 2509.23866).
    """

    images: int
    turns: int

    def __post_init__(self) -> None:
        if self.images < 1 or self.turns < 0:
            raise ValueError(f"history needs images >= 1 and turns >= 0, got {self}")

    def visible(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns that go into the next prompt, oldest first; `turns` is the whole past."""
        kept = list(turns[max(0, len(turns) - self.turns) :])
        without_image = max(0, len(kept) - (self.images - 1))  # turns that lose their screenshot
        text_only = [turn.model_copy(update={"screenshot": None}) for turn in kept[:without_image]]
        return text_only + kept[without_image:]
