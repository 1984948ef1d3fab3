"""Batches that are trained on again: which, when, and why not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bus.errors import CheckpointError
from bus.messages import Batch, BatchTrained, Outcome, StepMismatch
from dart_cli.config.schema import Config
from dart_cli.data.ledger import Ledger
from dart_cli.data.replays import GAP, Replays, most_behind
from dart_cli.data.scheduler import NotYet
from dart_cli.data.store.open import open_store
from dart_cli.data.store.writer import Store
from tests.data.parts import (
    MIXED,
    a_batch,
    assert_replays_are_conserved,
    assert_sums_are_conserved,
    batch_trained,
    hello,
    make_ledger,
    next_batch,
    picture_of,
    play_group,
    small_config,
)


def order_of(reuse: int, batches: int, refused: frozenset[int] = frozenset()) -> list[int]:
    """Of each batch the fresh one that it is a use of; the `refused` are not trained on again."""
    replays = Replays(reuse)
    uses: list[int] = []
    while len(uses) < batches:
        use = replays.due()
        if use is not None and use.first in refused:
            replays.end(use.first)
            continue
        number = len(uses) + 1
        if use is None:
            replays.note_filed(number, None, 0)
        else:
            replays.note_filed(number, use.first, use.reused + 1)
        uses.append(number if use is None else use.first)
    return uses


def test_each_batch_comes_once_more_after_others() -> None:
    assert order_of(1, 9) == [1, 2, 1, 4, 2, 6, 4, 8, 6]


def test_a_refused_batch_leaves_its_turn_to_the_next() -> None:
    assert order_of(1, 7, frozenset({1})) == [1, 2, 3, 2, 5, 3, 7]


@given(st.integers(1, 4), st.frozensets(st.integers(1, 80), max_size=20))
def test_uses_are_apart_bounded_and_never_too_old_by_their_order_alone(
    reuse: int, refused: frozenset[int]
) -> None:
    order = order_of(reuse, 120, refused)
    since_fresh = 0
    last: dict[int, int] = {}
    count: dict[int, int] = {}
    for number, first in enumerate(order, start=1):
        if first == number:
            since_fresh = 0
        else:
            since_fresh += 1
            count[first] = count.get(first, 0) + 1
            assert number - last[first] >= GAP
            assert number - first <= most_behind(
                max_staleness=0, reused=count[first], reuse=reuse, publish_every=1
            )
        assert since_fresh <= reuse
        last[first] = number
    assert max(count.values(), default=0) <= reuse
    done = [
        first
        for first in sorted(set(order[: 120 - reuse * GAP * (reuse + 1)]))
        if first not in refused
    ]
    assert all(count[first] == reuse for first in done)
    assert not refused & count.keys()


def test_what_is_owed_is_what_comes_before_the_next_fresh_batch() -> None:
    for reuse in (1, 2, 3):
        replays = Replays(reuse)
        for number in range(1, 60):
            owed = replays.owed
            use = replays.due()
            assert (owed > 0) == (use is not None)
            if use is None:
                replays.note_filed(number, None, 0)
            else:
                replays.note_filed(number, use.first, use.reused + 1)
                assert replays.owed == owed - 1


def test_a_run_that_reuses_from_now_on_begins_with_its_newest_batches() -> None:
    replays = Replays(1)
    for number in range(1, 1001):
        replays.note_filed(number, None, 0)
    waited = []
    for number in range(1001, 1021):
        use = replays.due()
        if use is None:
            replays.note_filed(number, None, 0)
        else:
            waited.append(number - use.first)
            replays.note_filed(number, use.first, use.reused + 1)
    assert waited[0] == 4
    assert waited[2:] == [3] * 8  # as where batches were always trained on again


# --- in the ledger --------------------------------------------------------------------------


def reusing(run_dir: Path, **train: object) -> Config:
    return small_config(
        run_dir,
        train={"reuse": 1, "checkpoint_every": 1, **train},
        groups_per_batch=1,
        max_open_groups=0,
    )


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return reusing(tmp_path / "run")


def train_on(
    ledger: Ledger, updates: int, outcomes: list[Outcome] = MIXED, *, is_skipped: bool = False
) -> list[Batch]:
    """So many updates; a group is played whenever the trainer would wait for one."""
    served = []
    for _ in range(updates):
        version = ledger.updates
        found = next_batch(ledger, version)
        if isinstance(found, NotYet):
            play_group(ledger, outcomes, version=version)
            found = next_batch(ledger, version)
        served.append(a_batch(found))
        ledger.batch_trained(batch_trained(served[-1].batch_id, version + 1, is_skipped=is_skipped))
    return served


def decided(store: Store, batch_id: int) -> list[tuple[bool, str, int | None]]:
    return [
        (each.used, each.reason, each.batch_id) for each in store.decisions(f"batch {batch_id}")
    ]


def test_a_replay_is_a_batch_of_its_own_with_the_same_samples(config: Config, store: Store) -> None:
    ledger = make_ledger(config, store)
    first, second, again = train_on(ledger, 3)
    assert [first.batch_id, second.batch_id, again.batch_id] == [1, 2, 3]
    assert (first.reuse, again.reuse) == (0, 1)
    same = {"samples", "chains", "images", "group_ids", "temperature"}
    assert again.model_dump(include=same) == first.model_dump(include=same)
    assert [(age.version, age.behind) for age in again.ages] == [(0, 2)]
    row = store.batch(3)
    assert (row.replay_of, row.reuse, row.state) == (1, 1, "trained")
    assert store.batch_groups(3) == store.batch_groups(1) == first.group_ids
    assert store.batch_rows(3) == store.batch_rows(1)
    assert decided(store, 1) == [(True, "replay", 3)]
    assert {row.batch_id for row in store.trajectories(group_ids=first.group_ids)} == {1}
    assert store.staleness() == {0: 2 * 4 * 2 * 3}
    assert store.staleness(replays=True) == {2: 4 * 2 * 3}


def test_a_replay_keeps_the_gaps_of_the_first_use(config: Config, store: Store) -> None:
    ledger = make_ledger(config, store)
    for number in (1, 2, 3):
        play_group(ledger, MIXED, version=number - 1)
        batch = a_batch(next_batch(ledger, number - 1))
        sample = batch.samples[0]
        gap = StepMismatch(
            trajectory_id=sample.trajectory_id, step=sample.step, mean=0.1 * number, largest=0.5
        )
        ledger.batch_trained(
            BatchTrained(batch_id=number, policy_version=number, metrics={}, mismatches=[gap])
        )
    assert batch.reuse == 1
    assert [row.gap_mean for row in store.batch_rows(1) if row.gap_mean] == [0.1]


def test_the_order_goes_on_after_a_restart_at_any_update(config: Config) -> None:
    order: list[int] = []
    for _ in range(9):
        with open_store(config.run.dir) as store:
            ledger = make_ledger(config, store)
            [batch] = train_on(ledger, 1)
            order.append(store.batch(batch.batch_id).replay_of or batch.batch_id)
    assert order == [1, 2, 1, 4, 2, 6, 4, 8, 6]


def test_a_trainer_that_went_back_gets_the_same_uses_again(config: Config, store: Store) -> None:
    ledger = make_ledger(config, store)
    served = train_on(ledger, 7)
    ledger.hello(hello(3))
    ledger = make_ledger(config, store)
    again = train_on(ledger, 4)
    assert [(each.batch_id, each.reuse, each.samples) for each in again] == [
        (each.batch_id, each.reuse, each.samples) for each in served[3:]
    ]
    assert len(store.batches()) == 7
    assert [store.batch(each.batch_id).replay_of for each in train_on(ledger, 2)] == [None, 6]


def test_a_batch_that_the_trainer_skipped_is_not_trained_on_again(
    config: Config, store: Store
) -> None:
    ledger = make_ledger(config, store)
    train_on(ledger, 1, is_skipped=True)
    assert [each.reuse for each in train_on(ledger, 4)] == [0, 0, 1, 0]
    assert decided(store, 1) == [(False, "low_ess", 1)]
    assert decided(store, 2) == [(True, "replay", 4)]


@pytest.mark.parametrize("reuse", [1, 2])
def test_a_replay_that_was_skipped_ends_the_uses_of_its_batch(tmp_path: Path, reuse: int) -> None:
    """And is told of once, however often the trainer goes back and skips it."""
    config = reusing(tmp_path / "run", reuse=reuse)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        train_on(ledger, 2)
        for _ in range(2):
            train_on(ledger, 1, is_skipped=True)
            ledger = make_ledger(config, store)
            ledger.hello(hello(2))
        train_on(ledger, 9)
        assert decided(store, 1) == [(True, "replay", 3), (False, "low_ess", 3)]
        assert [row.reuse for row in store.replays(2)] == [1, 2][:reuse]


def test_a_batch_whose_tokens_are_too_old_is_not_trained_on_again(
    config: Config, store: Store
) -> None:
    off = config.model_copy(update={"train": config.train.model_copy(update={"reuse": 0})})
    train_on(make_ledger(off, store), 9)
    ledger = make_ledger(config, store)
    most = config.data.max_staleness + 4
    next_batch(ledger, 30)  # a trainer whose weights are of another line
    assert [decided(store, each) for each in (6, 8)] == [[(False, "stale", None)]] * 2
    assert most < 30 - 8
    assert len(store.batches()) == 9


def test_screenshots_of_a_batch_stay_until_it_was_trained_on_again(tmp_path: Path) -> None:
    config = reusing(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        served = train_on(ledger, 2)
        while ledger.make_room(100):
            pass
        [again] = train_on(ledger, 1)
        assert again.reuse == 1
        assert again.images == served[0].images != {}
        train_on(ledger, 9)
        while ledger.make_room(100):
            pass
        assert not store.has_screenshots(1)
        with pytest.raises(CheckpointError, match=r"batch 1 cannot be served again"):
            ledger.hello(hello(0))
        ledger.hello(hello(store.batches()[-1].id - 2))  # a checkpoint that is still kept


def test_a_batch_that_lacks_a_screenshot_is_not_trained_on_again(
    config: Config, store: Store
) -> None:
    train_on(make_ledger(config, store), 2)
    store.remove_screenshots(2, 1000)
    assert [each.reuse for each in train_on(make_ledger(config, store), 3)] == [0, 1, 0]
    assert decided(store, 1) == [(False, "incomplete", None)]


@pytest.mark.parametrize("scheduling", ["rollout", "april"])
@pytest.mark.parametrize(("reuse", "publish_every"), [(1, 1), (2, 1), (1, 2)])
def test_an_on_policy_run_with_replays_goes_on_and_trains_no_stale_group(
    tmp_path: Path, scheduling: str, reuse: int, publish_every: int
) -> None:
    """Slots play whenever they may, with the newest weights; nothing is dropped as too old."""
    config = Config.model_validate(
        {
            **small_config(
                tmp_path / "run", max_staleness=0, scheduling=scheduling, max_open_groups=0
            ).model_dump(),
            "train": {"reuse": reuse},
            "weights": {"publish_every": publish_every},
        }
    )
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for _ in range(20):
            published = ledger.updates // publish_every
            while isinstance(found := next_batch(ledger, published), NotYet):
                assert not ledger.turn
                play_group(ledger, MIXED, version=published)
            ledger.batch_trained(
                batch_trained(found.batch_id, (ledger.updates + 1) // publish_every)
            )
        assert set(store.staleness()) == {0}
        assert not store.groups("dropped")
        assert (
            sum(row.replay_of is not None for row in store.batches())
            >= 20 * reuse // (reuse + 1) - GAP
        )


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_each_use_comes_exactly_once_whatever_ends_and_goes_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, reuse: int
) -> None:
    """A trainer that asks, trains, skips, dies and goes back; a data process that is killed."""
    run_dir = tmp_path_factory.mktemp("replays") / "run"
    config = reusing(run_dir, reuse=reuse)
    draws = random.Random(seed)
    in_weights: list[int] = []  # batches, as the trainer has them
    oldest = 0  # of its checkpoints
    served: dict[int, Batch] = {}
    store = open_store(run_dir)
    ledger = make_ledger(config, store)
    for _ in range(80):
        event = draws.random()
        if event < 0.1:
            store.commit()
            before = picture_of(ledger)
            store.close()
            store = open_store(run_dir)
            ledger = make_ledger(config, store)
            assert picture_of(ledger) == before
        elif event < 0.2:
            del in_weights[max(oldest, len(in_weights) - draws.randint(0, 3)) :]
            ledger.hello(hello(len(in_weights)))
        elif event < 0.25:
            ledger.make_room(10)
        else:
            version = ledger.trainer_version
            found = next_batch(ledger, version)
            if isinstance(found, NotYet):
                play_group(
                    ledger, draws.choice([MIXED, ["pass", "fail", "fail", "fail"]]), version=version
                )
                found = a_batch(next_batch(ledger, version))
            assert found.batch_id == len(in_weights) + 1
            first = served.setdefault(found.batch_id, found)
            assert (found.samples, found.images) == (first.samples, first.images)
            if draws.random() < 0.8:  # else the trainer dies before it has trained on it
                in_weights.append(found.batch_id)
                oldest = max(oldest, len(in_weights) - 3)
                is_skipped = draws.random() < 0.1
                ledger.batch_trained(
                    batch_trained(found.batch_id, version + 1, is_skipped=is_skipped)
                )
    assert_sums_are_conserved(ledger, store)
    assert_replays_are_conserved(store, reuse)
    assert any(row.replay_of for row in store.batches())
    store.close()
