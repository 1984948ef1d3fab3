"""Whether the patches of a step fit its tokens, before it is filed.

    patch_mistake   of what was sampled
    map_mistake     of where its pointers looked

A pointer is three tokens in a row, `start`, `pad` and `end`, of which the last has the patch. Which ids
these are follows from the first one: all others of a step must be made of the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.messages import PointerMap, SampledTokens


def patch_mistake(sampled: SampledTokens, cells: int | None = None) -> str:
    """What is wrong with the patches; empty if nothing. `cells`: of the last screenshot, if known."""
    patches, token_ids = sampled.patches, sampled.token_ids
    if not patches:
        return ""
    if len(patches) != len(token_ids):
        return f"{len(patches)} patches for {len(token_ids)} token_ids"
    if min(patches) < -1 or max(patches) >= 2**31:
        return "patches must be -1 or in [0, 2 ** 31)"
    places = [at for at, patch in enumerate(patches) if patch >= 0]
    if not places:
        return "patches must be empty where no token has one"
    if cells is not None and max(patches) >= cells:
        return f"patch {max(patches)}, but the last screenshot has {cells} cells"
    triple = token_ids[max(places[0] - 2, 0) : places[0] + 1]
    if len(set(triple)) != 3:
        return f"the patch of token {places[0]} is not that of a pointer: start, pad, end"
    for at, token in enumerate(token_ids):
        if token not in triple:
            if patches[at] >= 0:
                return f"token {at} has a patch, but is no end of a pointer"
            continue
        part = triple.index(token)
        begun = token_ids[max(at - part, 0) : at + 1]
        if begun != triple[: part + 1] or (patches[at] >= 0) != (part == 2):
            return f"token {at} is one of a pointer, but out of its order or without its patch"
        is_last = at + 1 == len(token_ids)
        if part < 2 and not is_last and token_ids[at + 1] != triple[part + 1]:
            return f"token {at} is one of a pointer, but out of its order or without its patch"
        if part == 1 and any(
            values and values[at] != 0 for values in (sampled.behaviour_logprobs, sampled.entropies)
        ):
            return f"token {at} is forced: its log-probability and its entropy must be 0"
    return ""


def map_mistake(pointed: Sequence[PointerMap], patches: Sequence[int]) -> str:
    """What is wrong with the maps of a step with these patches; empty if nothing."""
    for each in pointed:
        cells = each.rows * each.columns
        if len(each.heat) != cells:
            return f"a map of {each.rows} x {each.columns} cells has {len(each.heat)}"
        if each.position >= len(patches) or not 0 <= patches[each.position] < cells:
            return f"a map of token {each.position}, which has no patch of it"
    return ""
