"""What a plan counts of the host's memory is what the trainer holds."""

from __future__ import annotations

import numpy as np
import pytest

from dart_cli.train.packs.plan import IMAGE, Costs, plan

EPISODES, STEPS, SCREEN, TURN, HEADER = 12, 15, 27, 3, 6


def _sequences(shown: int) -> tuple[list[np.ndarray], list[set[int]]]:
    """Each step's sequence with a sliding window of screens, and the screens in it."""
    rng = np.random.default_rng(0)
    sequences, screens = [], []
    header = rng.integers(0, 1000, HEADER, dtype=np.uint32)
    for episode in range(EPISODES):
        turns = [
            rng.integers(0, 1000, rng.integers(1, 2 * TURN), dtype=np.uint32) for _ in range(STEPS)
        ]
        numbers = range(episode * STEPS, (episode + 1) * STEPS)
        for step in range(shown - 1, STEPS):
            parts = [header]
            for past in range(step + 1):
                if past > step - shown:
                    parts.append(np.full(SCREEN, IMAGE + numbers[past], dtype=np.uint32))
                parts.append(turns[past])
            sequences.append(np.concatenate(parts))
            screens.append({numbers[past] for past in range(step - shown + 1, step + 1)})
    return sequences, screens


@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_features_of_screens_are_held_for_fewer_than_an_updates(ranks: int) -> None:
    """From the first pack of a rank that shows a screen to the last (dart_cli/train/packs/pack.py)."""
    sequences, screens = _sequences(5)
    dealt = plan(sequences, pack_tokens=400, costs=Costs(1.0, 0.001), ranks=ranks)
    held = np.zeros(len(dealt[0]), dtype=np.int64)
    for packs in dealt:
        seen: dict[int, list[int]] = {}
        for index, pack in enumerate(packs):
            for number in set().union(*(screens[node.sequence] for node in pack.nodes)):
                seen.setdefault(number, []).append(index)
        for indices in seen.values():
            held[indices[0] : indices[-1] + 1] += 1
    assert 0 < held.max() <= EPISODES * STEPS
