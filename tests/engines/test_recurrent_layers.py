"""The transformers engine with recurrent layers: states of rows, snapshots, and faults that must be noticed.

The promises of the other modules are proved for such a model too: tests that are imported here run with this
module's policy.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from dart_cli.engines import batch
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.batch import SHORT_PARTING
from dart_cli.engines.caches import (
    BLOCK,
    BatchKVCache,
    empty_cache,
    kv_bytes_per_token,
    state_bytes_per_row,
)
from dart_cli.engines.states import StateSnapshots
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.delta_net import LayerStates, StateCache
from dart_cli.policy.forward import last_hidden
from dart_cli.policy.loader import LoadedPolicy, weight_tensors
from dart_cli.policy.state_plan import StateShape
from tests.engines.conftest import Asker, asker, screenshot
from tests.engines.exact import largest_error, rounding
from tests.engines.test_continuous import (
    endless,
    test_a_fault_in_a_prefill_ends_its_joiners_and_spares_the_rows,
    test_more_than_fit_drawn_together_are_the_same_again_to_the_last_bit,
    test_numbers_are_those_of_a_fresh_forward_however_rows_come_and_go,
)
from tests.engines.test_pointer_sampling import pointing_policy
from tests.engines.test_pointer_sampling import (
    test_numbers_are_exact_in_mixed_batches_and_after_a_live_update as exact_in_mixed_batches,
)
from tests.engines.test_prefix_cache import (
    counts,
    played,
    test_a_group_computes_its_first_prompt_once_whether_together_or_later,
    test_a_member_is_served_from_a_prompt_that_is_still_being_answered,
    test_a_pass_that_failed_leaves_nothing_behind,
    test_a_suspended_completion_goes_on_from_what_it_had,
    test_keys_and_values_of_older_weights_never_serve_a_new_request,
    test_prompts_that_have_more_and_less_in_the_cache_share_passes,
    test_the_same_calls_to_two_engines_give_the_same_numbers_to_the_last_bit,
)
from tests.engines.test_transformers_engine import (
    assert_exact,
    gather,
    serving,
    test_greedy_takes_the_likeliest_and_scores_the_untempered_distribution,
    test_new_weights_arrive_in_mid_batch_and_every_token_has_the_numbers_of_its_version,
)
from tests.engines.test_weight_changes import (
    test_a_prompt_is_computed_anew_under_other_weights,
)

__all__ = [
    "test_a_fault_in_a_prefill_ends_its_joiners_and_spares_the_rows",
    "test_a_group_computes_its_first_prompt_once_whether_together_or_later",
    "test_a_member_is_served_from_a_prompt_that_is_still_being_answered",
    "test_a_pass_that_failed_leaves_nothing_behind",
    "test_a_prompt_is_computed_anew_under_other_weights",
    "test_a_suspended_completion_goes_on_from_what_it_had",
    "test_greedy_takes_the_likeliest_and_scores_the_untempered_distribution",
    "test_keys_and_values_of_older_weights_never_serve_a_new_request",
    "test_more_than_fit_drawn_together_are_the_same_again_to_the_last_bit",
    "test_new_weights_arrive_in_mid_batch_and_every_token_has_the_numbers_of_its_version",
    "test_numbers_are_those_of_a_fresh_forward_however_rows_come_and_go",
    "test_prompts_that_have_more_and_less_in_the_cache_share_passes",
    "test_the_same_calls_to_two_engines_give_the_same_numbers_to_the_last_bit",
]


@pytest.fixture(scope="module")
def untrained_folder(family: Callable[[str], Path]) -> Path:
    """A small random model with three recurrent layers of four."""
    return family("qwen3_5")


def snapshots_of(engine: TransformersEngine) -> StateSnapshots:
    snapshots = engine._batch._prefixes.snapshots
    assert snapshots is not None
    return snapshots


def varied(request: GenerateRequest, keep: int, seed: int, **changes: Any) -> GenerateRequest:
    """A request whose prompt differs behind its first `keep` tokens; its completion has another seed."""
    rest = len(request.prompt_token_ids) - keep
    token_ids = request.prompt_token_ids[:keep] + Random(seed).choices(range(60, 120), k=rest)
    sampling = request.sampling.model_copy(update={"seed": seed})
    return replace(request, prompt_token_ids=token_ids, sampling=sampling, **changes)


# --- which tokens are computed ----------------------------------------------------------------


async def test_prompts_that_part_leave_a_snapshot_from_which_the_third_goes_on(
    policy: LoadedPolicy, ask: Asker
) -> None:
    first = ask(1, past_images=2)
    last_image = (
        len(first.prompt_token_ids) - 1 - first.prompt_token_ids[::-1].index(policy.image_token_id)
    )
    first = replace(first, prompt_token_ids=[*first.prompt_token_ids, *range(60, 120)])
    keep = last_image + 3
    parting = keep // BLOCK * BLOCK
    requests = [first, *(varied(first, keep, seed) for seed in (2, 3, 4))]
    taken: list[int] = []
    async with serving(policy) as engine:
        generations = []
        for request in requests:
            before = counts(engine)[2]
            generations.append(await engine.generate(request))
            taken.append(counts(engine)[2] - before)
        together = [varied(first, keep, seed) for seed in range(5, 9)]
        before = counts(engine)[2]
        generations += await engine.generate_together(together)
        assert counts(engine)[2] - before == 4 * parting
    # The first two have nothing to begin from: the second only finds where they part.
    assert taken == [0, 0, parting, parting]
    for request, generation in zip([*requests, *together], generations, strict=True):
        assert_exact(policy, request, generation, 1.0)


async def test_a_snapshot_never_serves_equal_tokens_with_another_screen(
    policy: LoadedPolicy, ask: Asker
) -> None:
    request = ask(3, past_images=2)
    places = [i for i, t in enumerate(request.prompt_token_ids) if t == policy.image_token_id]
    tokens = [policy.images.token_count(image) for image in request.images]
    asked = [request]
    expected = [0]
    for changed in range(3):
        parting = places[sum(tokens[:changed])] // BLOCK * BLOCK
        for seed in (1, 2):
            images = list(request.images)
            images[changed] = screenshot(1000 * seed + changed, 168, 168)
            assert policy.images.token_count(images[changed]) == tokens[changed]
            asked.append(replace(request, images=images))
            expected.append(parting if seed == 2 and parting >= SHORT_PARTING else 0)
    async with serving(policy) as engine:
        generations, taken = [], []
        for each in asked:
            before = counts(engine)[2]
            generations.append(await engine.generate(each))
            taken.append(counts(engine)[2] - before)
    # A later part that changes goes on from where an earlier one parted, or from before.
    assert taken[1:3] == expected[1:3]
    assert taken[4] == expected[4] > 0
    assert taken[6] == expected[6] > taken[4]
    for each, generation in zip(asked, generations, strict=True):
        assert_exact(policy, each, generation, 1.0)


async def test_a_long_completion_is_not_computed_again_in_the_next_step(
    policy: LoadedPolicy,
) -> None:
    endless(policy)
    async with serving(policy) as engine:
        steps = await played(engine, 1, turns=3, max_tokens=70)
        asked, computed, cached = counts(engine)
        # Each prompt has left one snapshot at its end, and one more within its completion.
        assert len(snapshots_of(engine)) == 2 * len(steps)
    ends = [len(request.prompt_token_ids) for request, _ in steps]
    had = [len(r.prompt_token_ids) + len(g.sampled.token_ids) - 1 for r, g in steps[:-1]]
    assert cached == sum(count // BLOCK * BLOCK for count in had)
    assert computed == asked - cached < sum(ends) / 2
    for request, generation in steps:
        assert_exact(policy, request, generation, 1.0)


async def test_a_cache_for_few_snapshots_forgets_the_oldest_and_stays_exact(
    policy: LoadedPolicy,
) -> None:
    """Too little for either part: blocks go under snapshots, and snapshots over blocks."""
    state = state_bytes_per_row(policy.model)
    async with serving(policy, prefix_bytes=2 * 5 * state, max_batch=3) as engine:
        snapshots = snapshots_of(engine)
        assert snapshots.capacity == 4
        blocks = engine._batch._prefixes
        trajectories = await asyncio.gather(*(played(engine, seed) for seed in range(6)))
        assert len(snapshots) == 4
        assert 0 < len(blocks) * BLOCK * kv_bytes_per_token(policy.model) <= 5 * state
        alone = await played(engine, 9)
        assert counts(engine)[2] > 0
    for request, generation in (step for steps in [*trajectories, alone] for step in steps):
        assert_exact(policy, request, generation, 1.0)


async def test_what_one_pass_leaves_never_overwrites_what_the_next_one_of_its_prefill_reads(
    policy: LoadedPolicy, ask: Asker
) -> None:
    state = state_bytes_per_row(policy.model)
    token = kv_bytes_per_token(policy.model)
    known = ask(1, past_images=3, max_tokens=1)
    long = [replace(ask(20 + i), images=[], prompt_token_ids=[20 + i, 30] * 400) for i in range(3)]
    room = 2 * max(3 * state, 2000 * token)
    async with serving(policy, prefix_bytes=room) as engine:
        snapshots = snapshots_of(engine)
        snapshots.capacity = 2
        snapshots.clear()
        await engine.generate(known)
        before = counts(engine)[2]
        again = replace(known, sampling=known.sampling.model_copy(update={"seed": 5}))
        passes = engine.gauges()["prefills"]
        generations = await engine.generate_together([*long, again])
        assert engine.gauges()["prefills"] - passes == 2
        assert counts(engine)[2] - before == (len(known.prompt_token_ids) - 1) // BLOCK * BLOCK
        assert len(snapshots) == 2
    for request, generation in zip([*long, again], generations, strict=True):
        assert_exact(policy, request, generation, 1.0)


async def test_without_memory_for_it_nothing_is_kept_and_nothing_is_cut(
    policy: LoadedPolicy, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts: list[Any] = []

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        cuts.extend(options.get("cuts", ()))
        return last_hidden(*args, **options)

    monkeypatch.setattr(batch, "last_hidden", watched)
    request = ask(1, past_images=2, max_tokens=40)
    async with serving(policy, prefix_bytes=0) as engine:
        generations = [await engine.generate(request) for _ in range(2)]
        assert counts(engine)[2] == len(snapshots_of(engine)) == 0
        assert snapshots_of(engine)._layers == []
    assert cuts == [[], []]
    for generation in generations:
        assert_exact(policy, request, generation, 1.0)


async def test_a_snapshot_that_does_not_fit_is_left_out_and_no_request_notices(
    policy: LoadedPolicy, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless(policy)
    request = ask(1, past_images=2, max_tokens=40)

    class Full:
        """A layer of snapshots that has no memory."""

        def __init__(self, like: torch.Tensor) -> None:
            self._like = like
            self.device = like.device

        def __setitem__(self, rows: torch.Tensor, values: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("no room")

    async with serving(policy) as engine:
        snapshots = snapshots_of(engine)
        whole = snapshots._layers[1]
        snapshots._layers[1] = LayerStates(Full(whole.inputs), whole.states)  # type: ignore[arg-type]
        refused = await engine.generate(request)
        assert len(snapshots) == 0
        snapshots._layers[1] = whole
        before = counts(engine)[2]
        again = await engine.generate(request)
        assert counts(engine)[2] == before
        last = await engine.generate(request)
        assert counts(engine)[2] > before
    for generation in (refused, again, last):
        assert_exact(policy, request, generation, 1.0)


async def test_pointers_are_exact(pointer_folder: Callable[[str], Path], tmp_path: Path) -> None:
    policy = pointing_policy(pointer_folder("qwen3_5"))
    await exact_in_mixed_batches(policy, asker(policy), tmp_path)


# --- faults that must be noticed --------------------------------------------------------------


async def largest_gap(policy: LoadedPolicy, ask: Asker) -> float:
    """The largest error of a log-probability, for rows of several lengths that join, leave and go on."""
    endless(policy)
    requests = [ask(i, past_images=i % 2, max_tokens=(3, 20, 34)[i % 3]) for i in range(5)]
    async with serving(policy, max_batch=3) as engine:
        generations = await gather(engine, requests)
        parts = [varied(requests[0], 80, seed) for seed in (3, 4, 5)]
        generations += [await engine.generate(part) for part in parts]
        extended = [
            extended_by(request, generation, 10 + 9 * place)
            for place, (request, generation) in enumerate(
                zip(requests, generations[:5], strict=True)
            )
        ]
        generations += await engine.generate_together(extended)
    weights = [dict(weight_tensors(policy.model))]
    return max(
        largest_error(policy, request, generation, weights)
        for request, generation in zip([*requests, *parts, *extended], generations, strict=True)
    )


def extended_by(request: GenerateRequest, drawn: Generation, count: int) -> GenerateRequest:
    """The request whose prompt goes on after a completion, by `count` tokens."""
    more = [*drawn.sampled.token_ids, *range(60, 60 + count)]
    return replace(request, prompt_token_ids=request.prompt_token_ids + more)


def swapped(states: LayerStates) -> LayerStates:
    return LayerStates(states.inputs.roll(1, 0), states.states.roll(1, 0))


def join_with_another_rows_state(patch: pytest.MonkeyPatch) -> None:
    join = StateCache.join
    patch.setattr(StateCache, "join", lambda self, fresh: join(self, swapped(fresh)))


def join_with_no_state(patch: pytest.MonkeyPatch) -> None:
    join = StateCache.join

    def blank(self: StateCache, fresh: LayerStates) -> None:
        join(self, LayerStates(fresh.inputs, torch.zeros_like(fresh.states)))

    patch.setattr(StateCache, "join", blank)


def join_with_no_convolution(patch: pytest.MonkeyPatch) -> None:
    join = StateCache.join

    def blank(self: StateCache, fresh: LayerStates) -> None:
        join(self, LayerStates(torch.zeros_like(fresh.inputs), fresh.states))

    patch.setattr(StateCache, "join", blank)


def leave_without_moving_states(patch: pytest.MonkeyPatch) -> None:
    remove = BatchKVCache.remove

    def unmoved(self: BatchKVCache, rows: Sequence[int]) -> list[int]:
        kept = [layer.kept for layer in self.layers if isinstance(layer, StateCache)]
        order = remove(self, rows)
        left = [layer for layer in self.layers if isinstance(layer, StateCache)]
        for layer, whole in zip(left, kept if left else [], strict=True):
            assert whole is not None
            layer.kept = whole.select(torch.arange(len(order)))
        return order

    patch.setattr(BatchKVCache, "remove", unmoved)


def continue_from_another_snapshot(patch: pytest.MonkeyPatch) -> None:
    read = StateSnapshots.read

    def wrong(self: StateSnapshots, cache: Any, keys: Sequence[bytes | None]) -> None:
        others = dict(zip(self._slots, [*self._slots][1:] + [*self._slots][:1], strict=True))
        read(self, cache, [others[key] if key else None for key in keys])

    patch.setattr(StateSnapshots, "read", wrong)


def begin_from_zeros(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSnapshots, "read", lambda *_: None)


def leave_the_snapshot_of_another_row(patch: pytest.MonkeyPatch) -> None:
    store = StateSnapshots.store

    def wrong(self: StateSnapshots, keys: Any, states: Any, former: Any = ()) -> None:
        store(self, keys, [swapped(layer) for layer in states], former)

    patch.setattr(StateSnapshots, "store", wrong)


FAULTS = (
    join_with_another_rows_state,
    join_with_no_state,
    join_with_no_convolution,
    leave_without_moving_states,
    continue_from_another_snapshot,
    begin_from_zeros,
    leave_the_snapshot_of_another_row,
)


async def test_rows_that_join_leave_and_go_on_are_exact(policy: LoadedPolicy, ask: Asker) -> None:
    assert await largest_gap(policy, ask) < rounding(policy)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_state_of_another_place_is_noticed(
    policy: LoadedPolicy,
    ask: Asker,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    fault(monkeypatch)
    assert await largest_gap(policy, ask) > 100 * rounding(policy)


# --- the parts alone --------------------------------------------------------------------------


@torch.inference_mode()
def test_a_row_takes_as_many_bytes_as_is_said(policy: LoadedPolicy) -> None:
    cache = empty_cache(policy.model)
    inputs = policy.inputs([list(range(20, 60))], [[]])
    last_hidden(policy.model, inputs, last=1, cache=cache)
    states = [layer.kept for layer in cache.layers if isinstance(layer, StateCache)]
    held = sum(each.inputs.nbytes + each.states.nbytes for each in states if each)
    assert len(states) == 3
    assert state_bytes_per_row(policy.model) == held
    others = [layer for layer in cache.layers if not isinstance(layer, StateCache)]
    assert kv_bytes_per_token(policy.model) * 40 == sum(
        part.nbytes for layer in others for part in (layer.keys, layer.values)
    )


def test_snapshots_are_those_that_were_taken_last(policy: LoadedPolicy) -> None:
    """Against a model of it: any order of storing, moving, using and dropping, in too little memory."""
    shape = StateShape.of(policy.model)
    assert shape is not None
    capacity = 5
    snapshots = StateSnapshots(
        policy.model, shape, (capacity + 1) * state_bytes_per_row(policy.model)
    )
    assert snapshots.capacity == capacity
    rng = Random(0)
    used: OrderedDict[bytes, float] = OrderedDict()  # oldest first
    evicted = hits = 0
    for number in range(500):
        keys = [bytes([rng.randrange(12)]) for _ in range(rng.randint(1, 3))]
        kind = rng.choice(["store", "store", "longest", "clear" if number % 50 == 0 else "read"])
        if kind == "store":
            former = [bytes([rng.randrange(12)])] if rng.random() < 0.3 else []
            values = [rng.random() for _ in keys]
            snapshots.store(keys, states_with(shape, values), former)
            for key in former:
                used.pop(key, None)
            for key, value in zip(keys, values, strict=True):
                if key not in used and len(used) == capacity:
                    used.popitem(last=False)
                    evicted += 1
                used.setdefault(key, value)
                used.move_to_end(key)
        elif kind == "longest":
            expected = max((i + 1 for i, key in enumerate(keys) if key in used), default=0)
            assert snapshots.longest(keys) == expected
            if expected:
                used.move_to_end(keys[expected - 1])
                hits += 1
        elif kind == "clear":
            snapshots.clear()
            used.clear()
        elif present := [key if key in used else None for key in keys]:
            cache = empty_cache(policy.model)
            snapshots.read(cache, present)
            for layer in shape.layers:
                kept = cache.layers[layer].begin()
                assert (kept is not None) == any(present)
                for row, key in enumerate(present if kept else []):
                    value = used[key] + layer if key else 0.0
                    assert float(kept.states[row].min()) == pytest.approx(value)
                    assert float(kept.states[row].max()) == pytest.approx(value)
                    assert float(kept.inputs[row].max()) == pytest.approx(-value)
        assert len(snapshots) == len(used)
    assert hits > 50
    assert evicted > 50


def states_with(shape: StateShape, values: Sequence[float]) -> list[LayerStates]:
    """States of each recurrent layer that hold one number for each sequence."""
    column = torch.tensor(values)
    return [
        LayerStates(
            -(column + layer)[:, None, None].expand(-1, shape.columns, shape.channels),
            (column + layer)[:, None, None, None].expand(-1, shape.heads, shape.key, shape.value),
        )
        for layer in shape.layers
    ]
