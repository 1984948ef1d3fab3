"""Which seeds are played and kept follows from the outcomes alone."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from bus.messages import TrajectoryEnd
from dart_cli.collect import CollectOptions
from dart_cli.collect.quotas import Quota, task_seed
from envs.contract.registry import find_task


@given(
    outcomes=st.lists(st.booleans(), min_size=1, max_size=60),
    wanted=st.integers(1, 4),
    shuffle=st.randoms(use_true_random=False),
    slots=st.integers(1, 6),
)
def test_what_is_kept_depends_on_outcomes_and_not_on_which_episode_ends_first(
    outcomes: list[bool], wanted: int, shuffle: Random, slots: int
) -> None:
    """The first successes of the seeds in their order, whatever the interleaving."""
    passes = {task_seed(0, "t", i): outcomes[i % len(outcomes)] for i in range(16 * wanted)}
    quota = Quota(find_task("mini", "mini/click"), CollectOptions(wanted, player="policy"), 0)
    quota.task = quota.task.__class__("t", "mini", "", 3)
    playing: list[int] = []
    kept: list[int] = []
    while True:
        while quota.wants_more and len(playing) < slots:
            playing.append(quota.next_seed())
        if not playing:
            break
        seed = playing.pop(shuffle.randrange(len(playing)))
        quota.add_episode(_end("pass" if passes[seed] else "fail"))
        if passes[seed]:
            kept.append(seed)
    in_order = [seed for seed in passes if passes[seed]][:wanted]
    assert sorted(kept) == sorted(in_order)
    assert quota.missing == wanted - len(kept)


def test_a_seed_that_comes_again_is_not_played_again() -> None:
    """Otherwise the folder would hold the same success twice, which import refuses."""
    quota = Quota(find_task("mini", "mini/click"), CollectOptions(16), 4970)
    seeds = [task_seed(4970, "mini/click", number) for number in range(17)]
    assert len(set(seeds)) == 16
    assert [quota.next_seed() for _ in range(16)] == list(dict.fromkeys(seeds))


def _end(outcome: str) -> TrajectoryEnd:
    return TrajectoryEnd.model_validate(
        {
            "trajectory_id": "t",
            "steps": 1,
            "outcome": outcome,
            "reason": "",
            "stop_reason": "done",
            "screenshot": None,
            "reset_s": 0.0,
            "wall_s": 0.0,
        }
    )
