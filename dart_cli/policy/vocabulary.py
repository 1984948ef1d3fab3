"""Which tokens of a vocabulary a policy may write; without torch."""

from __future__ import annotations

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
"""Tokens that build a prompt; sampled, they would break the next forward pass or the next prompt."""


def forbidden_ids(
    known: Mapping[str, int], vocabulary: int, *, ends: Iterable[int], others: Iterable[int]
) -> set[int]:
    """Ids below `vocabulary` that are never sampled: structure, `others`, rows no token stands for.

    `ends`, and END if it is known, may be: a completion ends with one.
    """
    forbidden = {known[token] for token in STRUCTURAL if token in known} | set(others)
    forbidden |= set(range(vocabulary)) - set(known.values())
    return forbidden.difference(ends, {known[END]} if END in known else ())
