"""Tokens of the supported vocabularies, and text that is only text; without torch.

forbidden_ids   what a policy never samples
LiteralText     marks text from outside, so that no special token is read in it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

END = "<|im_end|>"

STRUCTURAL = (
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Tokens that structure a prompt; in a completion they would break the next forward pass or prompt."""

BOXES = ("<|box_start|>", "<|box_end|>")
THOUGHTS = ("<think>", "</think>")
"""Special tokens that completions contain and that structure no prompt: they may be read in any text."""

CUT = "\ufdd0"
"""Between two parts of a text that are tokenised apart. A Unicode noncharacter, which no text has."""
SLOT = "\ufdd1"
"""In the place of tokens that are known already. Another noncharacter."""


def forbidden_ids(
    known: Mapping[str, int], vocabulary: int, *, ends: Iterable[int], others: Iterable[int]
) -> set[int]:
    """Ids below `vocabulary` that are never sampled: STRUCTURAL, `others`, and rows without a token.

    `ends`, and END if `known`, are sampled: a completion ends with one of them.
    """
    forbidden = {known[token] for token in STRUCTURAL if token in known} | set(others)
    forbidden |= set(range(vocabulary)) - set(known.values())
    return forbidden.difference(ends, {known[END]} if END in known else ())


class LiteralText:
    """Marks text that is not ours, so that a tokenizer reads no token of `special` but BOXES and THOUGHTS in it."""

    def __init__(self, special: Iterable[str]) -> None:
        # A token of one character cannot be cut; no supported vocabulary has one.
        names = sorted({token for token in special if len(token) > 1}.difference(BOXES, THOUGHTS))
        alternatives = "|".join(map(re.escape, names))
        self._first = re.compile(rf"(?=(?:{alternatives}))([\s\S])") if names else None

    def mark(self, text: str) -> str:
        """`text` with a CUT within each special token that it spells, and without noncharacters of ours."""
        plain = text.replace(CUT, "").replace(SLOT, "")
        return plain if self._first is None else self._first.sub(rf"\1{CUT}", plain)
