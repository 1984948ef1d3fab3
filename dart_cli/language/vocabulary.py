"""The special tokens of the supported vocabularies, and how text from outside is kept free of them.

This module does not import torch.

forbidden_ids   returns the tokens that a policy never samples
LiteralText     marks text from outside, so that a tokenizer reads no special token in it
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
"""Tokens that structure a prompt. A completion that contained them would break the next forward pass or the
next prompt."""

BOXES = ("<|box_start|>", "<|box_end|>")
THOUGHTS = ("<think>", "</think>")
"""Special tokens that completions contain and that do not structure prompts. They may be read in any text."""

CUT = "\ufdd0"
"""A mark between two parts of a text that are tokenised one by one: a Unicode noncharacter, which no text
has."""
SLOT = "\ufdd1"
"""A mark in the place of tokens that are known already: another noncharacter."""


def forbidden_ids(
    vocabulary: Mapping[str, int], rows: int, *, ends: Iterable[int], others: Iterable[int]
) -> set[int]:
    """Return the ids below `rows` that are never sampled: STRUCTURAL, `others`, and rows without a token.

    `ends`, and END if the vocabulary has it, are sampled, because a completion ends with one of them.
    """
    forbidden = {vocabulary[token] for token in STRUCTURAL if token in vocabulary} | set(others)
    forbidden |= set(range(rows)) - set(vocabulary.values())
    return forbidden.difference(ends, {vocabulary[END]} if END in vocabulary else ())


class LiteralText:
    """Marks text from outside, so that a tokenizer reads no special token in it but BOXES and THOUGHTS."""

    def __init__(self, special: Iterable[str]) -> None:
        # A token of one character cannot be cut; no supported vocabulary has one.
        names = sorted({token for token in special if len(token) > 1}.difference(BOXES, THOUGHTS))
        alternatives = "|".join(map(re.escape, names))
        self._first = re.compile(rf"(?=(?:{alternatives}))([\s\S])") if names else None

    def mark(self, text: str) -> str:
        """Return `text` with a CUT within each special token that it spells, and no other CUTs or SLOTs."""
        plain = text.replace(CUT, "").replace(SLOT, "")
        return plain if self._first is None else self._first.sub(rf"\1{CUT}", plain)
