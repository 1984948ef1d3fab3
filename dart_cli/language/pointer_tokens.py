"""The tokens of a pointer, and the patches of a completion. This module does not import torch.

    PointerTokens   the ids of the tokens in one model's vocabulary, and which token another one forces
    pointer_tokens  reads the PointerTokens of a model from its config.json
    patch_mistake   describes what is wrong with the patches of a completion
    map_mistake     describes what is wrong with the maps of a completion's pointers
    drop_forced     removes the numbers of forced tokens from the numbers of a completion
    DrawnPatch      a patch with its log-probability and entropy
    drawn_patches   returns the patches of a completion

A pointer is three tokens in a row. `start` is sampled like any token. It forces `pad`, and `pad` forces
`end`. With `end` a patch is drawn, from the last hidden state at `pad`. So `end` counts as drawn, because its
patch is; only `pad` is determined by the token before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bus.messages import PointerMap, SampledTokens
from dart_cli.config.architecture import TOKENS, pointer_ids

START, PAD, END = TOKENS
TRIPLE = START + PAD + END
"""A pointer as text."""


@dataclass(frozen=True)
class PointerTokens:
    """The ids of the pointer tokens in one model's vocabulary."""

    start: int
    pad: int
    end: int

    @property
    def triple(self) -> tuple[int, int, int]:
        """A pointer as token ids."""
        return self.start, self.pad, self.end

    @property
    def forced(self) -> tuple[int, int]:
        """The tokens that are never drawn from the vocabulary."""
        return self.pad, self.end

    def forced_after(self, token: int) -> int | None:
        """Return the token that must follow `token`; None if the next token is drawn."""
        if token == self.start:
            return self.pad
        return self.end if token == self.pad else None


def pointer_tokens(config: Mapping[str, Any]) -> PointerTokens | None:
    """Return the pointer tokens that a model's config.json names; None if the model has no pointer head.

    Raises ModelError if only some of the tokens are named.
    """
    ids = pointer_ids(config)
    return None if ids is None else PointerTokens(*ids)


Triple = tuple[int, int, int]
"""The token ids of start, pad and end."""


def patch_mistake(
    token_ids: Sequence[int],
    patches: Sequence[int],
    *numbers: Sequence[float],
    triple: Triple | None = None,
    cells: int | None = None,
) -> str:
    """Return what is wrong with the patches of a completion, or "" if nothing is.

    All sequences are [A]; `patches` and `numbers` may be empty. `numbers` are log-probabilities or entropies,
    which must be 0 for a forced token. `triple` are the model's pointer tokens. If they are not known, all
    patches must have the tokens of the first one. `cells` is the number of cells of the screenshot that is
    pointed into, if known.
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
        tokens = token_ids[max(first - 2, 0) : first + 1]
        if len(set(tokens)) != 3:
            return f"the patch of token {first} is not that of a pointer: start, pad, end"
        triple = tokens[0], tokens[1], tokens[2]
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
    """Return what is wrong with the order of pointer tokens, or "" if nothing is.

    start, pad and end must follow one another, and each end must have a patch. The last pointer may be cut
    off.
    """
    following = {triple[0]: triple[1], triple[1]: triple[2]}
    before: int | None = None
    for at, (token, patch) in enumerate(zip(token_ids, patches, strict=True)):
        expected = None if before is None else following.get(before)
        is_forced = token in triple[1:]
        if (is_forced or expected is not None) and token != expected:
            return f"token {at} is one of a pointer, or follows one, out of its order"
        if (patch >= 0) != (token == triple[2]):
            return f"token {at} must have a patch if, and only if, it is a pointer's end"
        before = token
    return ""


def map_mistake(pointed: Sequence[PointerMap], patches: Sequence[int]) -> str:
    """Return what is wrong with the maps of a step with these patches, or "" if nothing is."""
    for pointer_map in pointed:
        rows, columns, position = pointer_map.rows, pointer_map.columns, pointer_map.position
        cells = rows * columns
        if len(pointer_map.heat) != cells:
            return f"a map of {rows} x {columns} cells has {len(pointer_map.heat)}"
        if position >= len(patches) or not 0 <= patches[position] < cells:
            return f"a map of token {position}, which has no patch of it"
    return ""


def drop_forced(values: Sequence[float], patches: Sequence[int]) -> list[float]:
    """Return `values` [A] of a completion's tokens without the value of each pad, the token before a patch.

    The value of a pad that ends the completion is kept, because only the model's token ids would show that it
    is one.
    """
    following = [*patches[1:], -1] if patches else [-1] * len(values)
    return [value for value, after in zip(values, following, strict=True) if after < 0]


@dataclass(frozen=True)
class DrawnPatch:
    """A patch that a pointer drew."""

    token: int  # position in the completion
    patch: int  # the cell, counted row by row from 0
    row: int | None  # None if the screen's shape is not known
    column: int | None
    logprob: float | None  # nats; None if it is not known
    entropy: float | None  # nats


def drawn_patches(sampled: SampledTokens, pointed: Sequence[PointerMap] = ()) -> list[DrawnPatch]:
    """Return the patches of a completion, in order; the maps `pointed` have the shapes of the screens."""
    columns = {pointer_map.position: pointer_map.columns for pointer_map in pointed}
    logprobs, entropies = sampled.behaviour_logprobs, sampled.entropies
    return [
        DrawnPatch(
            token=at,
            patch=patch,
            row=patch // columns[at] if at in columns else None,
            column=patch % columns[at] if at in columns else None,
            logprob=logprobs[at] if logprobs else None,
            entropy=entropies[at] if entropies else None,
        )
        for at, patch in enumerate(sampled.patches)
        if patch >= 0
    ]
