"""A completion goes on after a partial with every column of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import EngineError
from bus.messages import PointerMap
from dart_cli.engines.completions import CompletionBuilder, DrawnToken, hint_between
from tests.data.parts import DRAG

MAP = PointerMap(position=3, rows=1, columns=8, heat=bytes(8))


@pytest.mark.parametrize("cut", range(len(DRAG)))
def test_a_completion_that_points_goes_on_from_any_place(cut: int) -> None:
    def feed(builder: CompletionBuilder, first: int, last: int) -> None:
        for at in range(first, last):
            drawn = DrawnToken(
                *(DRAG.token_ids[at], DRAG.behaviour_logprobs[at]),
                *(DRAG.entropies[at], DRAG.patches[at]),
            )
            builder.add(drawn, 0)

    begun = CompletionBuilder()
    feed(begun, 0, cut)
    begun.pointed += [MAP] if cut > 3 else []
    partial = begun.generation("suspended", 0.0, 0.0)
    assert bool(partial.sampled.patches) == (cut > 3), "[] where no token has one"
    resumed = CompletionBuilder(partial.sampled, partial.pointed)
    feed(resumed, cut, len(DRAG))
    whole = resumed.generation("end", 0.0, 0.0)
    assert whole.sampled == DRAG
    assert whole.pointed == partial.pointed


def test_tokens_without_patches_have_none() -> None:
    builder = CompletionBuilder()
    builder.extend([4, 5], [-1.0, -0.5], [1.0, 0.5], [3, 3])
    builder.add(DrawnToken(6, -0.25, 0.5), 4)
    assert builder.generation("end", 0.0, 0.0).sampled.patches == []


def test_patches_of_another_length_are_refused() -> None:
    with pytest.raises(EngineError, match=r"9 tokens .* 9 entropies, 1 patches and 9 versions"):
        CompletionBuilder(DRAG.model_copy(update={"patches": [3]}))


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_a_hint_makes_one_prompt_of_the_other_and_repeats_neither_end(
    plain: list[int], hinted: list[int]
) -> None:
    hint = hint_between(plain, hinted)
    assert 0 <= hint.start <= hint.end <= len(plain)
    assert plain[: hint.start] + list(hint.token_ids) + plain[hint.end :] == hinted
    own, other = plain[hint.start : hint.end], list(hint.token_ids)
    if own and other:
        assert own[0] != other[0]
        assert own[-1] != other[-1]
    assert bool(own or other) == (plain != hinted)
