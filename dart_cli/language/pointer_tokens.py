"""The tokens of a pointer, and the patches that they were drawn with, without torch.

    PointerTokens   their ids in one model's vocabulary, and which token another one forces
    patch_mistake   what is wrong with the patches of a completion
    map_mistake     what is wrong with the maps of where its pointers looked
    drawn           the numbers of a completion's tokens that the policy drew
    DrawnPatch      a patch with its numbers; drawn_patches, those of a completion

A pointer is three tokens in a row. `start` is sampled like any token. After it `pad` is forced, and after `pad`
the token `end`, with which a patch is drawn: from the last hidden state of `pad`. `end` counts as drawn, because
its patch is; `pad` alone follows from the token before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bus.messages import PointerMap, SampledTokens
from dart_cli.config.architecture import TOKENS, pointer_ids

START, PAD, END = TOKENS
TRIPLE = START + PAD + END
"""A pointer, as text."""


@dataclass(frozen=True)
class PointerTokens:
    """Token ids of one model."""

    start: int
    pad: int
    end: int

    @property
    def triple(self) -> tuple[int, int, int]:
        """A pointer, as token ids."""
        return self.start, self.pad, self.end

    @property
    def forced(self) -> tuple[int, int]:
        """Those that are never drawn from the vocabulary."""
        return self.pad, self.end

    def forced_after(self, token: int) -> int | None:
        """Return the token that must follow `token`; None where the next one is drawn."""
        if token == self.start:
            return self.pad
        return self.end if token == self.pad else None


def pointer_tokens(config: Mapping[str, Any]) -> PointerTokens | None:
    """Return the tokens of a config.json; None for a folder without a head. Raises ModelError for a part of them."""
    ids = pointer_ids(config)
    return None if ids is None else PointerTokens(*ids)


Triple = tuple[int, int, int]
"""Token ids of start, pad and end."""


def patch_mistake(
    token_ids: Sequence[int],
    patches: Sequence[int],
    *numbers: Sequence[float],
    triple: Triple | None = None,
    cells: int | None = None,
) -> str:
    """Return what is wrong; empty if nothing. All are [A], `patches` and `numbers` perhaps empty.

    `numbers` are those that a forced token has none of: log-probabilities and entropies. `triple` are the
    model's tokens; where they are not known, those of the first patch must be those of all others.
    `cells`: of the screenshot that is pointed into, if known.
    """
    if patches:
        if len(patches) != len(token_ids):
            return f"{len(patches)} patches for {len(token_ids)} token_ids"
        if min(patches) < -1 or max(patches) >= 2**31:
            return "patches must be -1 or in [0, 2 ** 31)"
        if max(patches) < 0:
            return "patches must be empty where no token has one"
        if cells is not None and max(patches) >= cells:
            return f"patch {max(patches)}, but the last screenshot has {cells} cells"
    elif triple is None:
        return ""
    if triple is None:
        first = next(at for at, patch in enumerate(patches) if patch >= 0)
        begun = tuple(token_ids[max(first - 2, 0) : first + 1])
        if len(set(begun)) != 3:
            return f"the patch of token {first} is not that of a pointer: start, pad, end"
        triple = begun[0], begun[1], begun[2]
    return _order_mistake(token_ids, patches or [-1] * len(token_ids), triple) or next(
        (
            f"token {at} is forced: its log-probability and its entropy must be 0"
            for values in numbers
            for at, value in enumerate(values)
            if value != 0 and token_ids[at] == triple[1]
        ),
        "",
    )


def _order_mistake(token_ids: Sequence[int], patches: Sequence[int], triple: Triple) -> str:
    """Whether start, pad and end follow one another, and each end has a patch; the last may be cut off."""
    following = dict(zip((*triple[:2],), triple[1:], strict=True))
    before: int | None = None
    for at, (token, patch) in enumerate(zip(token_ids, patches, strict=True)):
        wanted = None if before is None else following.get(before)
        is_forced = token in triple[1:]
        if (is_forced or wanted is not None) and token != wanted:
            return f"token {at} is one of a pointer, or follows one, out of its order"
        if (patch >= 0) != (token == triple[2]):
            return f"token {at} must have a patch if, and only if, it is a pointer's end"
        before = token
    return ""


def map_mistake(pointed: Sequence[PointerMap], patches: Sequence[int]) -> str:
    """Return what is wrong with the maps of a step with these patches; empty if nothing."""
    for each in pointed:
        cells = each.rows * each.columns
        if len(each.heat) != cells:
            return f"a map of {each.rows} x {each.columns} cells has {len(each.heat)}"
        if each.position >= len(patches) or not 0 <= patches[each.position] < cells:
            return f"a map of token {each.position}, which has no patch of it"
    return ""


def drawn(values: Sequence[float], patches: Sequence[int]) -> list[float]:
    """Those of the `values` [A] that are of tokens which were drawn: a pad before a patch was not.

    Where a completion ends with a pad, which only the model's token ids tell, it is among them.
    """
    following = [*patches[1:], -1] if patches else [-1] * len(values)
    return [value for value, after in zip(values, following, strict=True) if after < 0]


@dataclass(frozen=True)
class DrawnPatch:
    """A patch that a pointer drew."""

    token: int  # its place in the completion
    patch: int  # the cell, row by row from 0
    row: int | None  # None where the screen's shape is not known
    column: int | None
    logprob: float | None  # nats; None where it is not known
    entropy: float | None  # nats


def drawn_patches(sampled: SampledTokens, pointed: Sequence[PointerMap] = ()) -> list[DrawnPatch]:
    """Return the patches of a completion, in order; `pointed` tells the shapes of the screens."""
    columns = {each.position: each.columns for each in pointed}
    logprobs, entropies = sampled.behaviour_logprobs, sampled.entropies
    return [
        DrawnPatch(
            at,
            patch,
            patch // columns[at] if at in columns else None,
            patch % columns[at] if at in columns else None,
            logprobs[at] if logprobs else None,
            entropies[at] if entropies else None,
        )
        for at, patch in enumerate(sampled.patches)
        if patch >= 0
    ]
