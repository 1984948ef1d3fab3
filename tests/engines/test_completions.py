"""A completion goes on after a partial with every column of it."""

from __future__ import annotations

import pytest

from bus.errors import EngineError
from bus.messages import PointerMap
from dart_cli.engines.completions import CompletionBuilder, DrawnToken
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
