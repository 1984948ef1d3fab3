"""Prompts that begin like earlier ones: what is computed again, and that the numbers stay the same."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from bus.errors import EngineError
from bus.messages import Sampling, Turn
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.caches import (
    BLOCK,
    BlockKeys,
    CachedPrefix,
    CachedRow,
    PrefixCache,
    kv_bytes_per_token,
)
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.images import PixelTable, PreparedImage
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from scripts.small_models import FAMILIES
from tests.engines.conftest import Asker, screenshot
from tests.engines.exact import put, random_versions, rounding
from tests.engines.test_continuous import endless, windowed_folder
from tests.engines.test_transformers_engine import assert_exact, begun, gather, serving
from tests.waiting import until
from tests.weights.sets import publish

__all__ = ["windowed_folder"]  # a fixture

SCREENS = ((168, 168), (224, 112), (112, 140))


def turn_of(shown: bytes, generation: Generation, policy: LoadedPolicy) -> Turn:
    """What came before the next screen."""
    token_ids = generation.sampled.token_ids
    return Turn(text=policy.decode(token_ids), screenshot=shown, token_ids=token_ids)


async def played(
    engine: TransformersEngine, seed: int, *, turns: int = 4, max_tokens: int = 12
) -> list[tuple[GenerateRequest, Generation]]:
    """A trajectory that keeps all of its screens: each prompt extends the one before."""
    renderer = PromptRenderer(engine.policy, part_order="instruction_first")
    past: list[Turn] = []
    steps = []
    for step in range(turns):
        screen = screenshot(100 * seed + step, *SCREENS[(seed + step) % 3])
        prompt = renderer.render(f"task {seed}", past, screen)
        request = GenerateRequest(
            f"{seed}/{step}",
            prompt.token_ids,
            prompt.images,
            Sampling(temperature=1.0, max_tokens=max_tokens - step, seed=100 * seed + step),
        )
        generation = await engine.generate(request)
        steps.append((request, generation))
        past.append(turn_of(screen, generation, engine.policy))
    return steps


def counts(engine: TransformersEngine) -> tuple[int, int, int]:
    """Tokens of prompts: asked for, computed, taken from the cache."""
    gauges = engine.gauges()
    names = ("prompt_tokens", "prefilled_tokens", "cached_tokens")
    asked, computed, cached = (int(gauges[name]) for name in names)
    assert asked == computed + cached
    return asked, computed, cached


def taken(steps: Sequence[tuple[GenerateRequest, Generation]]) -> int:
    """Tokens that a trajectory played alone takes from its own earlier steps."""
    total = 0
    for (before, drawn), (after, _) in pairwise(steps):
        had = before.prompt_token_ids + drawn.sampled.token_ids[:-1]
        assert after.prompt_token_ids[: len(had)] == had
        total += len(had) // BLOCK * BLOCK
    return total


@pytest.mark.parametrize("model_type", FAMILIES)
async def test_a_turn_computes_what_it_adds_and_its_numbers_are_those_of_a_fresh_forward(
    model_type: str, family: Callable[[str], Path]
) -> None:
    policy = load_policy(family(model_type))
    async with serving(policy) as engine:
        one = await played(engine, 1)
        assert counts(engine)[2] == taken(one)
        assert counts(engine)[1] < counts(engine)[0] / 2
        several = await asyncio.gather(*(played(engine, seed) for seed in range(2, 6)))
    async with serving(policy, prefix_bytes=0) as engine:
        again = [await played(engine, 1)]
        again += await asyncio.gather(*(played(engine, seed) for seed in range(2, 6)))
        assert counts(engine)[2] == 0
    for steps, plain in zip([one, *several], again, strict=True):
        for (request, generation), (_, expected) in zip(steps, plain, strict=True):
            assert generation.sampled.token_ids == expected.sampled.token_ids
            assert generation.sampled.behaviour_logprobs == pytest.approx(
                expected.sampled.behaviour_logprobs, abs=rounding(policy)
            )
            assert_exact(policy, request, generation, 1.0)
    assert max(len(request.images) for request, _ in one) == 4


async def test_numbers_are_exact_with_shared_heads_and_a_sliding_window(
    windowed_folder: Path,
) -> None:
    policy = load_policy(windowed_folder)
    async with serving(policy, max_batch=3) as engine:
        trajectories = await asyncio.gather(*(played(engine, seed) for seed in range(5)))
        assert counts(engine)[2] > 0
    for request, generation in (step for steps in trajectories for step in steps):
        assert_exact(policy, request, generation, 1.0)


async def test_a_group_computes_its_first_prompt_once_whether_together_or_later(
    policy: LoadedPolicy, ask: Asker
) -> None:
    members = [ask(1, past_images=2, sampling_seed=seed) for seed in range(9)]
    length = len(members[0].prompt_token_ids)
    async with serving(policy, max_batch=9) as engine:
        drawn = await engine.generate_together(members[:8])
        assert counts(engine) == (8 * length, length, 7 * length)
        assert engine.gauges()["prefills"] == 1
        drawn.append(await engine.generate(members[8]))
        assert counts(engine)[2] == 7 * length + (length - 1) // BLOCK * BLOCK
    assert len({tuple(each.sampled.token_ids) for each in drawn}) > 4
    for request, generation in zip(members, drawn, strict=True):
        assert_exact(policy, request, generation, 1.0)


async def test_a_member_is_served_from_a_prompt_that_is_still_being_answered(
    policy: LoadedPolicy, ask: Asker
) -> None:
    endless(policy)
    async with serving(policy) as engine:
        long = asyncio.create_task(engine.generate(ask(1, max_tokens=3000)))
        await begun(engine)
        member = ask(1, max_tokens=4, sampling_seed=7)
        generation = await engine.generate(member)
        assert counts(engine)[2] == (len(member.prompt_token_ids) - 1) // BLOCK * BLOCK
        engine.interrupt()
        await long
    assert_exact(policy, member, generation, 1.0)


async def test_prompts_that_have_more_and_less_in_the_cache_share_passes(
    policy: LoadedPolicy, ask: Asker
) -> None:
    """Of some nothing is known, of others all but a part of a screen; long and short ones."""
    known = [ask(seed, past_images=seed % 4) for seed in range(6)]
    unknown = [ask(seed, past_images=seed % 3) for seed in range(10, 16)]
    rng = Random(0)
    cut = [
        replace(request, sampling=request.sampling.model_copy(update={"seed": rng.randrange(99)}))
        for request in known
    ]
    long = replace(ask(30), images=[], prompt_token_ids=list(range(20, 30)) * 60)
    mixed = [each for pair in zip(cut, unknown, strict=True) for each in pair] + [long]
    async with serving(policy, max_batch=16) as engine:
        await gather(engine, known)
        before = engine.gauges()["prefills"]
        generations = await engine.generate_together(mixed)
        # The long one has its own pass, and those that lack little may have one.
        assert engine.gauges()["prefills"] - before in (2, 3)
        assert counts(engine)[2] > 0
    for request, generation in zip(mixed, generations, strict=True):
        assert_exact(policy, request, generation, 1.0)


async def test_a_prompt_that_goes_on_within_a_screen_of_the_one_before_is_exact(
    policy: LoadedPolicy, ask: Asker
) -> None:
    """Same tokens up to the end, and one of several screens another: taken is what comes before it."""
    request = ask(3, past_images=2)
    places = [i for i, t in enumerate(request.prompt_token_ids) if t == policy.image_token_id]
    tokens = [policy.images.token_count(image) for image in request.images]
    assert len(tokens) == 3
    for changed in range(3):
        images = list(request.images)
        size = SCREENS[0] if tokens[changed] == 36 else (196, 168)
        images[changed] = screenshot(1000 + changed, *size)
        assert policy.images.token_count(images[changed]) == tokens[changed]
        other = replace(request, images=images)
        async with serving(policy) as engine:
            await engine.generate(request)
            before = counts(engine)[2]
            generation = await engine.generate(other)
            first = places[sum(tokens[:changed])]
            assert counts(engine)[2] - before == first // BLOCK * BLOCK
        assert_exact(policy, other, generation, 1.0)


async def test_keys_and_values_of_older_weights_never_serve_a_new_request(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    versions = random_versions(policy, 3)
    paths = [publish(tensors, tmp_path, number).path for number, tensors in enumerate(versions)]
    endless(policy)
    request, over = ask(1, past_images=2), ask(2, max_tokens=3000)
    async with serving(policy) as engine:
        await engine.generate(request)
        running = asyncio.create_task(engine.generate(over))
        await begun(engine)
        before = counts(engine)[2]
        await engine.update_weights(paths[1], 1)
        fresh = await engine.generate(request)
        engine.interrupt()
        mixed = await running
        extended = replace(
            over,
            prompt_token_ids=over.prompt_token_ids + mixed.sampled.token_ids[:200],
            sampling=over.sampling.model_copy(update={"max_tokens": 8}),
        )
        after = await engine.generate(extended)
        assert counts(engine)[2] == before
        again = await engine.generate(replace(extended, request_id="again"))
        assert counts(engine)[2] > before
        await engine.update_weights(paths[2], 1)  # other weights under the same number
        before = counts(engine)[2]
        newest = await engine.generate(request)
        assert counts(engine)[2] == before
    assert [span.version for span in mixed.sampled.version_spans] == [0, 1]
    put(policy, versions[1])
    for asked, generation in ((request, fresh), (extended, after), (extended, again)):
        assert_exact(policy, asked, generation, 1.0)
    put(policy, versions[2])
    assert_exact(policy, request, newest, 1.0)


async def test_a_suspended_completion_goes_on_from_what_it_had(
    policy: LoadedPolicy, ask: Asker
) -> None:
    endless(policy)
    requests = [ask(seed, past_images=seed % 3, max_tokens=150) for seed in range(3)]
    async with serving(policy, prefix_bytes=0) as engine:
        straight = await gather(engine, requests)
    async with serving(policy) as engine:
        asks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await until(lambda: engine.gauges()["tokens"] >= 90)
        engine.interrupt()
        partials = [generation.sampled for generation in await asyncio.gather(*asks)]
        begun_before = [
            replace(request, partial=partial)
            for request, partial in zip(requests, partials, strict=True)
            if 0 < len(partial.token_ids) < 150
        ]
        before = counts(engine)
        whole = await engine.generate_together(begun_before)
        had = [
            len(request.prompt_token_ids) + len(request.partial.token_ids)
            for request in begun_before
            if request.partial is not None
        ]
        asked, _, cached = (a - b for a, b in zip(counts(engine), before, strict=True))
    assert begun_before
    assert asked == sum(had)
    # A pass computes as many tokens of each row as of the one that has most to compute.
    assert cached >= asked - len(had) * BLOCK
    for request, generation in zip(begun_before, whole, strict=True):
        expected = straight[requests.index(replace(request, partial=None))]
        assert generation.sampled.token_ids == expected.sampled.token_ids
        assert generation.sampled.behaviour_logprobs == pytest.approx(
            expected.sampled.behaviour_logprobs, abs=rounding(policy)
        )


async def test_a_small_cache_forgets_the_oldest_and_stays_exact(policy: LoadedPolicy) -> None:
    token = kv_bytes_per_token(policy.model)
    blocks = 12
    async with serving(policy, prefix_bytes=(blocks + 1) * BLOCK * token) as engine:
        trajectories = await asyncio.gather(*(played(engine, seed) for seed in range(6)))
        assert len(engine._batch._prefixes) == blocks
        alone = await played(engine, 9)
        before = counts(engine)[2]
        await engine.generate(trajectories[0][0][0])  # long gone
        assert counts(engine)[2] == before
    for request, generation in (step for steps in [*trajectories, alone] for step in steps):
        assert_exact(policy, request, generation, 1.0)


async def test_the_same_calls_to_two_engines_give_the_same_numbers_to_the_last_bit(
    policy: LoadedPolicy, ask: Asker
) -> None:
    calls = [
        [ask(seed, past_images=seed % 3, sampling_seed=seed + call) for seed in range(6)]
        for call in range(3)
    ]
    drawn = []
    for _ in range(2):
        async with serving(policy, max_batch=4) as engine:
            drawn.append([await engine.generate_together(requests) for requests in calls])
            assert counts(engine)[2] > 0
    assert [[each.sampled for each in call] for call in drawn[0]] == [
        [each.sampled for each in call] for call in drawn[1]
    ]


async def test_a_pass_that_failed_leaves_nothing_behind(policy: LoadedPolicy, ask: Asker) -> None:
    layers = policy.model.model.language_model.layers

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    async with serving(policy) as engine:
        hook = layers[-1].register_forward_pre_hook(fail)
        with pytest.raises(EngineError, match="no room"):
            await engine.generate(ask(1))
        hook.remove()
        generation = await engine.generate(ask(1))
        assert counts(engine)[2] == 0
    assert_exact(policy, ask(1), generation, 1.0)


# --- the cache alone --------------------------------------------------------------------------

IMAGE = 9


def image(key: str, tokens: int) -> PreparedImage:
    table = PixelTable(torch.zeros(3, 256), 2)
    return PreparedImage(key, torch.empty(0), (1, 2, 2), tokens, table)


def test_keys_differ_by_tokens_screens_and_what_came_before() -> None:
    tokens = [1] * 10 + [IMAGE] * 20 + [2] * 34
    keys = BlockKeys([image("a", 12), image("b", 8)], IMAGE).of(tokens)
    assert len(keys) == len(set(keys)) == 4
    assert BlockKeys([image("a", 12), image("b", 8)], IMAGE).of(tokens) == keys
    second = BlockKeys([image("a", 12), image("c", 8)], IMAGE).of(tokens)
    assert [x == y for x, y in zip(keys, second, strict=True)] == [True, False, False, False]
    first = BlockKeys([image("c", 12), image("b", 8)], IMAGE).of(tokens)
    changed = BlockKeys([image("a", 12), image("b", 8)], IMAGE).of([*tokens[:40], 3, *tokens[41:]])
    assert not set(first) & set(keys)
    assert [x == y for x, y in zip(keys, changed, strict=True)] == [True, True, False, False]


def test_keys_of_a_growing_sequence_are_those_of_the_whole() -> None:
    rng = Random(0)
    tokens = [IMAGE if rng.random() < 0.5 else rng.randrange(8) for _ in range(200)]
    count = tokens.count(IMAGE)
    images = [image("a", 7), image("b", count - 27), image("c", 20)]
    whole = BlockKeys(images, IMAGE).of(tokens)
    grown = BlockKeys(images, IMAGE)
    for length in (0, 3, 40, 41, 47, 48, 130, 200):
        assert grown.of(tokens[:length]) == whole[: length // BLOCK]
    assert grown.of(tokens[:50]) == whole[:3]


def cache_of(rows: Sequence[torch.Tensor], end: int) -> SimpleNamespace:
    """Rows [layers, 2, heads, tokens, width] that end before column `end`, with columns to spare."""
    layers = []
    for layer in range(rows[0].shape[0]):
        block = torch.full((len(rows), 2, *rows[0].shape[2:3], end + 5, rows[0].shape[4]), 99.0)
        for whole, row in zip(block, rows, strict=True):
            whole[:, :, end - row.shape[3] : end] = row[layer]
        layers.append(SimpleNamespace(keys=block[:, 0], values=block[:, 1]))
    return SimpleNamespace(layers=layers)


def test_what_is_read_is_what_was_stored_and_the_least_recently_used_goes_first(
    policy: LoadedPolicy,
) -> None:
    """Against a model of it: sequences that branch, in any order, in a cache too small for them."""
    text = policy.model.config.get_text_config(decoder=True)
    token = kv_bytes_per_token(policy.model)
    heads = text.num_key_value_heads
    width = token // (2 * 4 * text.num_hidden_layers * heads)
    capacity = 10
    cache = PrefixCache(policy.model, (capacity + 1) * BLOCK * token)
    generator = torch.Generator().manual_seed(0)
    rng = Random(0)
    used: OrderedDict[tuple[int, ...], None] = OrderedDict()  # prefixes, oldest first
    content: dict[tuple[int, ...], torch.Tensor] = {}
    hits, evicted = 0, 0
    for _ in range(400):
        rows, sequences = [], []
        for _ in range(rng.randint(1, 3)):
            path = tuple(rng.randrange(2) for _ in range(rng.randint(1, 6)))
            sequences.append([each + 1 for each in path for _ in range(BLOCK)] + [0] * 3)
            parts = []
            for end in range(1, len(path) + 1):
                if path[:end] not in content:
                    shape = (text.num_hidden_layers, 2, heads, BLOCK, width)
                    content[path[:end]] = torch.randn(shape, generator=generator)
                parts.append(content[path[:end]])
            tail = torch.randn((*parts[0].shape[:3], 3, width), generator=generator)
            rows.append((path, torch.cat([*parts, tail], dim=3)))
        keys = [BlockKeys([], IMAGE).of(sequence) for sequence in sequences]
        found = []
        for (path, _), known in zip(rows, keys, strict=True):
            expected = 0
            while expected < len(path) and path[: expected + 1] in used:
                expected += 1
            found.append(CachedPrefix(blocks := cache.match(known), 0))
            assert len(blocks) == expected
            hits += expected
            for end in range(expected, 0, -1):
                used.move_to_end(path[:end])
        columns = 5 * BLOCK + 3
        prefixes = [
            CachedPrefix(each.blocks, min(columns, rng.randint(0, len(each.blocks) * BLOCK)))
            for each in found
        ]
        if any(prefix.tokens for prefix in prefixes):
            read = cache.read(prefixes, columns)
            for row, (prefix, (_, whole)) in enumerate(zip(prefixes, rows, strict=True)):
                for number, layer in enumerate(read.layers):
                    both = torch.stack([layer.keys[row], layer.values[row]])
                    start = columns - prefix.tokens
                    assert torch.equal(both[:, :, start:], whole[number][:, :, : prefix.tokens])
                    assert not both[:, :, :start].any()
        end = max(whole.shape[3] for _, whole in rows)
        cache.store(
            cache_of([whole for _, whole in rows], end),
            [CachedRow(row, end - rows[row][1].shape[3], known) for row, known in enumerate(keys)],
        )
        for path, _ in rows:
            for length in range(1, len(path) + 1):
                if path[:length] in used:
                    used.move_to_end(path[:length])
                else:
                    used[path[:length]] = None
            for length in range(len(path), 0, -1):
                used.move_to_end(path[:length])
            while len(used) > capacity:
                used.popitem(last=False)
                evicted += 1
        assert len(cache) == len(used)
    assert hits > 100
    assert evicted > 100


def test_without_memory_nothing_is_kept(policy: LoadedPolicy) -> None:
    token = kv_bytes_per_token(policy.model)
    for limit in (0, BLOCK * token):
        cache = PrefixCache(policy.model, limit)
        keys = BlockKeys([], IMAGE).of([1] * 64)
        cache.store(SimpleNamespace(layers=[]), [CachedRow(0, 0, keys)])
        assert cache.match(keys) == []
        assert len(cache) == 0
