from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from bus.errors import EngineError, WeightsError
from bus.messages import SampledTokens, VersionSpan
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.forward import logits, masked_logprobs
from dart_cli.policy.loader import LoadedPolicy, load_policy, weight_tensors
from dart_cli.weights.file import load
from dart_cli.weights.manifest import MANIFEST, WEIGHTS
from tests.engines.exact import (
    fresh_numbers,
    put,
    random_versions,
    replayed_logprobs,
    rounding,
)
from tests.waiting import PATIENCE_S, until
from tests.weights.sets import publish

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Asker = Callable[..., GenerateRequest]


@contextlib.asynccontextmanager
async def serving(policy: LoadedPolicy, **options: object) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(policy, load_weights=load, **options)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        await engine.close()


async def gather(engine: TransformersEngine, requests: list[GenerateRequest]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def assert_exact(
    policy: LoadedPolicy, request: GenerateRequest, generation: Generation, temperature: float
) -> None:
    logprobs, entropies = fresh_numbers(policy, request, generation.sampled.token_ids, temperature)
    torch.testing.assert_close(
        torch.tensor(generation.sampled.behaviour_logprobs),
        logprobs,
        atol=rounding(policy),
        rtol=0,
    )
    torch.testing.assert_close(
        torch.tensor(generation.sampled.entropies), entropies, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_match_a_fresh_forward_over_turns_and_images(
    policy: LoadedPolicy, ask: Asker, temperature: float
) -> None:
    requests = [ask(i, past_images=i % 3, temperature=temperature) for i in range(24)]
    async with serving(policy, max_batch=7) as engine:
        generations = await gather(engine, requests)
    assert {len(request.images) for request in requests} == {1, 2, 3}
    for request, generation in zip(requests, generations, strict=True):
        assert_exact(policy, request, generation, temperature)


async def test_greedy_takes_the_likeliest_and_scores_the_untempered_distribution(
    policy: LoadedPolicy, ask: Asker
) -> None:
    request = ask(1, temperature=0.0)
    async with serving(policy) as engine:
        generation = await engine.generate(request)
    assert_exact(policy, request, generation, 1.0)
    for end in range(len(generation.sampled.token_ids)):
        tried = generation.sampled.token_ids[:end]
        inputs = policy.inputs([request.prompt_token_ids + tried], [request.images])
        with torch.inference_mode():
            values = logits(policy.model, inputs, last=1)[:, 0]
        best = masked_logprobs(values, policy.forbidden(values.device), 1.0).argmax()
        assert generation.sampled.token_ids[end] == int(best)


async def test_the_same_seed_gives_the_same_tokens_whatever_rides_along(
    policy: LoadedPolicy, ask: Asker
) -> None:
    requests = [ask(i, past_images=i % 2) for i in range(12)]
    async with serving(policy, max_batch=12, linger_s=0.05) as engine:
        together = await gather(engine, requests)
        alone = [await engine.generate(request) for request in reversed(requests)][::-1]
    for one, other in zip(together, alone, strict=True):
        assert one.sampled.token_ids == other.sampled.token_ids
        assert one.sampled.behaviour_logprobs == pytest.approx(
            other.sampled.behaviour_logprobs, abs=1e-5
        )


async def test_requests_drawn_together_are_one_batch_and_the_same_to_the_last_bit(
    policy: LoadedPolicy, ask: Asker
) -> None:
    requests = [ask(i, past_images=i % 2) for i in range(12)]
    drawn = []
    for _ in range(2):  # an engine remembers screens, so each begins with none
        async with serving(policy, max_batch=12) as engine:
            drawn.append(await engine.generate_together(requests))
            assert engine.gauges()["prefills"] == 1
    for one, other in zip(*drawn, strict=True):
        assert one.sampled.token_ids == other.sampled.token_ids
        assert one.sampled.behaviour_logprobs == other.sampled.behaviour_logprobs
        assert one.sampled.entropies == other.sampled.entropies


async def test_different_seeds_give_different_tokens(policy: LoadedPolicy, ask: Asker) -> None:
    requests = [ask(5, sampling_seed=seed) for seed in range(8)]
    async with serving(policy) as engine:
        generations = await gather(engine, requests)
    assert len({tuple(generation.sampled.token_ids) for generation in generations}) > 4


async def test_tokens_come_as_often_as_their_probability_says(
    policy: LoadedPolicy, ask: Asker
) -> None:
    count = 600
    requests = [ask(5, sampling_seed=seed, max_tokens=1, temperature=0.3) for seed in range(count)]
    async with serving(policy, max_batch=200, linger_s=0.2) as engine:
        generations = await gather(engine, requests)
    seen: dict[int, int] = {}
    for generation in generations:
        seen[generation.sampled.token_ids[0]] = seen.get(generation.sampled.token_ids[0], 0) + 1
    token, times = max(seen.items(), key=lambda item: item[1])
    logprobs, _ = fresh_numbers(policy, requests[0], [token], 0.3)
    chance = math.exp(float(logprobs[0]))
    spread = math.sqrt(count * chance * (1 - chance))
    assert abs(times - count * chance) < 4 * spread + 1


async def test_forbidden_tokens_are_never_sampled(policy: LoadedPolicy, ask: Asker) -> None:
    with torch.no_grad():  # make the forbidden ones the likeliest of all
        rows = policy.model.get_input_embeddings().weight
        rows[list(policy.forbidden_token_ids)] *= 30
    requests = [ask(i, temperature=2.0, max_tokens=12) for i in range(40)]
    async with serving(policy) as engine:
        generations = await gather(engine, requests)
    drawn = {token for generation in generations for token in generation.sampled.token_ids}
    assert not drawn & set(policy.forbidden_token_ids)
    assert all(math.isfinite(h) for generation in generations for h in generation.sampled.entropies)


async def test_a_completion_ends_with_the_end_token_or_at_its_length(
    policy: LoadedPolicy, ask: Asker
) -> None:
    with torch.no_grad():  # an end within a few tokens is likely, but not certain
        policy.model.get_input_embeddings().weight[list(policy.end_token_ids)] *= 4
    requests = [ask(i, max_tokens=1 + i % 9) for i in range(40)]
    async with serving(policy) as engine:
        generations = await gather(engine, requests)
    for request, generation in zip(requests, generations, strict=True):
        ends = [token in policy.end_token_ids for token in generation.sampled.token_ids]
        if generation.stop == "end":
            assert ends[-1]
        else:
            assert len(generation.sampled.token_ids) == request.sampling.max_tokens
            assert not ends[-1]
        assert not any(ends[:-1])
    assert {generation.stop for generation in generations} == {"end", "length"}


async def test_new_weights_arrive_in_mid_batch_and_every_token_has_the_numbers_of_its_version(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    versions = random_versions(policy, 6)
    # Beforehand: the engine would not wait for a slow disk.
    published = [publish(tensors, tmp_path, version) for version, tensors in enumerate(versions)]
    requests = [ask(i, past_images=i % 2, max_tokens=12) for i in range(96)]
    async with serving(policy, max_batch=8) as engine:
        waiting = [asyncio.create_task(engine.generate(request)) for request in requests[:-4]]
        for version in range(1, len(versions)):
            await asyncio.wait(waiting[: 15 * version], return_when=asyncio.ALL_COMPLETED)
            timing = await engine.update_weights(published[version].path, version)
            assert min(timing.transfer_s, timing.pause_s) >= 0
            assert engine.policy_version == version
        generations = [*await asyncio.gather(*waiting), *await gather(engine, requests[-4:])]
    used, mixed = set(), 0
    for request, generation in zip(requests, generations, strict=True):
        spans = generation.sampled.version_spans
        used |= {span.version for span in spans}
        mixed += len(spans) > 1
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(generation.sampled.token_ids)
        assert generation.sampled.behaviour_logprobs == pytest.approx(
            replayed_logprobs(policy, request, generation, versions), abs=rounding(policy)
        )
        if len(spans) == 1:
            put(policy, versions[spans[0].version])
            assert_exact(policy, request, generation, 1.0)
    assert used == set(range(len(versions)))
    assert mixed > 0


async def test_a_swap_waits_for_one_iteration_at_most_and_loses_no_request(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    policy.end_token_ids = (policy.forbidden_token_ids[0],)  # no completion ends by itself
    published = publish(random_versions(policy, 2)[1], tmp_path, 1)
    async with serving(policy) as engine:
        asking = asyncio.create_task(engine.generate(ask(1, max_tokens=2000)))
        await begun(engine)
        await engine.update_weights(published.path, 1)
        assert not asking.done()
        assert engine.gauges()["seconds.syncing"] > 0
        before = int(engine.gauges()["tokens"])
        await drawn_or_done(engine, before + 1, [asking])
        engine.interrupt()
        generation = await asking
    assert [span.version for span in generation.sampled.version_spans] == [0, 1]


async def begun(engine: TransformersEngine, requests: int = 1) -> None:
    """Wait until so many requests are in work."""
    await until(lambda: engine.gauges()["in_flight"] >= requests)


async def drawn_or_done(
    engine: TransformersEngine, tokens: int, asks: list[asyncio.Task[Generation]]
) -> None:
    """Wait until it has drawn so many tokens, or no request is left."""
    await until(lambda: engine.gauges()["tokens"] >= tokens or all(ask.done() for ask in asks))


def partial_of(generation: Generation) -> SampledTokens:
    return generation.sampled


def cut(generation: Generation, length: int, version: int = 0) -> SampledTokens:
    """The partial of a completion that was suspended after `length` tokens."""
    return SampledTokens(
        token_ids=generation.sampled.token_ids[:length],
        behaviour_logprobs=generation.sampled.behaviour_logprobs[:length],
        entropies=generation.sampled.entropies[:length],
        version_spans=[VersionSpan(version=version, start=0, end=length)] if length else [],
    )


@pytest.mark.parametrize("temperature", [1.0, 0.0])
async def test_a_partial_goes_on_elsewhere_token_for_token_from_any_place(
    policy: LoadedPolicy, untrained_folder: Path, ask: Asker, temperature: float
) -> None:
    requests = [ask(i, past_images=i % 2, temperature=temperature) for i in range(8)]
    async with serving(policy) as engine:
        whole = await gather(engine, requests)
    async with serving(load_policy(untrained_folder), linger_s=0.05) as elsewhere:
        resumed = [
            replace(request, partial=cut(generation, length))
            for request, generation in zip(requests, whole, strict=True)
            for length in range(len(generation.sampled.token_ids) + 1)
        ]
        again = await gather(elsewhere, resumed)
    expected = [
        generation for generation in whole for _ in range(len(generation.sampled.token_ids) + 1)
    ]
    assert len({len(request.partial.token_ids) for request in resumed if request.partial}) > 5
    for got, straight in zip(again, expected, strict=True):
        assert (got.sampled.token_ids, got.stop) == (straight.sampled.token_ids, straight.stop)
        assert got.sampled.behaviour_logprobs == pytest.approx(
            straight.sampled.behaviour_logprobs, abs=1e-5
        )
        assert got.sampled.entropies == pytest.approx(straight.sampled.entropies, abs=1e-4)
        assert got.sampled.version_spans == straight.sampled.version_spans


async def test_interrupted_again_and_again_a_completion_is_the_same(
    policy: LoadedPolicy, untrained_folder: Path, ask: Asker
) -> None:
    """Two engines in turn; what each returns is given to the other, until all have ended."""
    policy.end_token_ids = (policy.forbidden_token_ids[0],)
    other = load_policy(untrained_folder)
    other.end_token_ids = policy.end_token_ids
    requests = [ask(i, max_tokens=100 + 40 * i) for i in range(6)]
    async with serving(policy, max_batch=4) as one, serving(other, max_batch=4) as two:
        straight = await gather(one, requests)
        found: dict[int, Generation] = {}
        lengths: set[int] = set()
        rounds = 0
        while len(found) < len(requests):
            engine = (one, two)[rounds % 2]
            left = [i for i in range(len(requests)) if i not in found]
            drawn = int(engine.gauges()["tokens"])
            asks = [asyncio.create_task(engine.generate(requests[i])) for i in left]
            await drawn_or_done(engine, drawn + 150, asks)
            engine.interrupt()
            for i, generation in zip(left, await asyncio.gather(*asks), strict=True):
                if generation.stop == "suspended":
                    requests[i] = replace(requests[i], partial=partial_of(generation))
                    lengths.add(len(generation.sampled.token_ids))
                else:
                    found[i] = generation
            rounds += 1
    assert rounds > 2
    assert len(lengths) > 2
    for i, expected in enumerate(straight):
        assert (found[i].sampled.token_ids, found[i].stop) == (expected.sampled.token_ids, "length")
        assert found[i].sampled.behaviour_logprobs == pytest.approx(
            expected.sampled.behaviour_logprobs, abs=1e-5
        )
        assert found[i].sampled.version_spans == expected.sampled.version_spans


async def test_resumed_under_other_weights_the_new_tokens_are_those_of_a_fresh_forward(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    versions = random_versions(policy, 2)
    requests = [ask(i, past_images=i % 2, max_tokens=12) for i in range(6)]
    async with serving(policy) as engine:
        before = await gather(engine, requests)
        await engine.update_weights(publish(versions[1], tmp_path, 1).path, 1)
        resumed = [
            replace(request, partial=cut(generation, 4))
            for request, generation in zip(requests, before, strict=True)
        ]
        after = await gather(engine, resumed)
    assert any(len(generation.sampled.token_ids) > 4 for generation in after)
    for request, old, new in zip(requests, before, after, strict=True):
        assert new.sampled.token_ids[:4] == old.sampled.token_ids[:4]
        assert new.sampled.behaviour_logprobs[:4] == old.sampled.behaviour_logprobs[:4]
        if len(new.sampled.token_ids) > 4:
            assert new.sampled.version_spans == [
                VersionSpan(version=0, start=0, end=4),
                VersionSpan(version=1, start=4, end=len(new.sampled.token_ids)),
            ]
            fresh, entropies = fresh_numbers(policy, request, new.sampled.token_ids, 1.0)
            assert new.sampled.behaviour_logprobs[4:] == pytest.approx(fresh[4:].tolist(), abs=1e-5)
            assert new.sampled.entropies[4:] == pytest.approx(entropies[4:].tolist(), abs=1e-4)


async def test_an_interruption_ends_what_waits_and_returns_what_had_ended(
    policy: LoadedPolicy, ask: Asker
) -> None:
    policy.end_token_ids = (policy.forbidden_token_ids[0],)
    short, *long = ask(1, max_tokens=1), ask(2, max_tokens=3000), ask(4, max_tokens=3000)
    begun_before = SampledTokens(
        token_ids=[30, 31],
        behaviour_logprobs=[-1.0, -2.0],
        entropies=[0.5, 0.6],
        version_spans=[VersionSpan(version=7, start=0, end=2)],
    )
    third = replace(ask(3, max_tokens=50), partial=begun_before)
    async with serving(policy, max_batch=2) as engine:
        asks = [asyncio.create_task(engine.generate(each)) for each in (short, *long)]
        await begun(engine, 2)
        await until(lambda: engine.gauges()["finished"] == 1)
        await begun(engine, 2)
        asks.append(asyncio.create_task(engine.generate(third)))
        await until(lambda: engine.gauges()["waiting"] == 1)
        engine.interrupt()
        ended, *suspended, waited = await asyncio.gather(*asks)
        assert engine.gauges()["finished"] == 1
        assert (await engine.generate(ask(4, max_tokens=2))).stop == "length"
    for generation in suspended:
        assert 1 <= len(generation.sampled.token_ids) < 3000
        assert generation.stop == "suspended"
    assert (ended.stop, len(ended.sampled.token_ids)) == ("length", 1)
    assert partial_of(waited) == begun_before
    assert waited.stop == "suspended"


async def test_a_partial_that_cannot_be_continued_is_refused_by_name(
    policy: LoadedPolicy, ask: Asker
) -> None:
    drawn = SampledTokens(
        token_ids=[30, 31], behaviour_logprobs=[0.0] * 2, entropies=[0.0] * 2, version_spans=[]
    )
    good = cut(Generation(drawn, "length", 0, 0), 2)
    bad = {
        "never samples": good.model_copy(update={"token_ids": [30, policy.image_token_id]}),
        "1 log-probabilities": good.model_copy(update={"behaviour_logprobs": [0.0]}),
        "no version for token 0": good.model_copy(
            update={"version_spans": [VersionSpan(version=0, start=1, end=3)]}
        ),
    }
    async with serving(policy) as engine:
        for cause, partial in bad.items():
            with pytest.raises(EngineError, match=cause):
                await engine.generate(replace(ask(1), partial=partial))


async def test_bad_sets_are_refused_while_requests_run_and_none_of_them_notices(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    good = publish(weight_tensors(policy.model), tmp_path, 1)
    poisoned = {name: t * float("nan") for name, t in weight_tensors(policy.model).items()}
    bad = [publish(poisoned, tmp_path, 2).path, tmp_path / "absent"]
    for version, damage in ((3, cut_file), (4, flip_byte), (5, lose_manifest)):
        bad.append(publish(weight_tensors(policy.model), tmp_path, version).path)
        damage(bad[-1])
    requests = [ask(i, max_tokens=12) for i in range(40)]
    async with serving(policy, max_batch=8) as engine:
        straight = await gather(engine, requests)
        running = asyncio.gather(*(engine.generate(request) for request in requests))
        await begun(engine)
        for path in bad:
            with pytest.raises(WeightsError):
                await engine.update_weights(path, 9)
        meanwhile = await running
        assert engine.policy_version == 0
        await engine.update_weights(good.path, 1)
    for got, expected in zip(meanwhile, straight, strict=True):
        assert got.sampled.token_ids == expected.sampled.token_ids
        assert {span.version for span in got.sampled.version_spans} == {0}
        assert got.sampled.behaviour_logprobs == pytest.approx(
            expected.sampled.behaviour_logprobs, abs=1e-5
        )


def cut_file(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-7])


def flip_byte(path: Path) -> None:
    data = bytearray((path / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (path / WEIGHTS).write_bytes(data)


def lose_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


async def test_a_bad_weight_set_is_refused_and_the_old_weights_go_on_serving(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    tensors = weight_tensors(policy.model)
    lacking = dict(list(tensors.items())[1:])
    reshaped = {**tensors, next(iter(tensors)): torch.zeros(3)}
    poisoned = {**tensors, next(iter(tensors)): next(iter(tensors.values())) * float("nan")}
    sets = [publish(bad, tmp_path, i + 1) for i, bad in enumerate((lacking, reshaped, poisoned))]
    truncated = publish(tensors, tmp_path, 4)
    file = truncated.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    request = ask(1)
    async with serving(policy) as engine:
        before = await engine.generate(request)
        for bad in [published.path for published in [*sets, truncated]] + [tmp_path / "absent"]:
            with pytest.raises(WeightsError):
                await engine.update_weights(bad, 9)
        after = await engine.generate(request)
    assert engine.policy_version == 0
    assert after.sampled.token_ids == before.sampled.token_ids
    assert after.sampled.behaviour_logprobs == before.sampled.behaviour_logprobs


async def test_old_vision_features_are_forgotten_with_the_old_weights(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    request = ask(1)
    async with serving(policy) as engine:
        await engine.generate(request)
        changed = {
            name: tensor * 1.5 if "visual" in name else tensor
            for name, tensor in weight_tensors(policy.model).items()
        }
        published = publish(changed, tmp_path, 1)
        await engine.update_weights(published.path, 1)
        assert_exact(policy, request, await engine.generate(request), 1.0)


async def test_cancelling_frees_the_place(policy: LoadedPolicy, ask: Asker) -> None:
    requests = [ask(i, max_tokens=30) for i in range(30)]
    async with serving(policy, max_batch=2) as engine:
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0)
        for task in tasks[1:]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        gauges = engine.gauges()
        assert gauges["finished"] < 10
        again = await gather(engine, [ask(i, max_tokens=2) for i in range(4)])
    assert isinstance(outcomes[0], Generation)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[1:])
    assert len(again) == 4


async def test_cancelling_ends_a_row_that_is_being_decoded(
    policy: LoadedPolicy, ask: Asker
) -> None:
    policy.end_token_ids = (policy.forbidden_token_ids[0],)  # no completion ends by itself
    async with serving(policy) as engine:
        task = asyncio.create_task(engine.generate(ask(1, max_tokens=3000)))
        for _ in range(1000):
            if engine.gauges()["in_flight"]:
                break
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await engine.generate(ask(2, max_tokens=3))).sampled.token_ids) <= 3
        assert engine.gauges()["tokens"] < 2000


async def test_prompts_that_cannot_be_served_are_refused_before_they_wait(
    policy: LoadedPolicy, ask: Asker
) -> None:
    good = ask(1)
    without_image = GenerateRequest("a", good.prompt_token_ids, [], good.sampling)
    empty = GenerateRequest("b", [], [], good.sampling)
    long = GenerateRequest("c", [9] * policy.max_positions, [], good.sampling)
    broken = GenerateRequest("d", good.prompt_token_ids, [b"no image"], good.sampling)
    async with serving(policy) as engine:
        for request in (without_image, empty, long, broken):
            with pytest.raises(EngineError):
                await engine.generate(request)
        assert (await engine.generate(good)).sampled.token_ids


async def test_closing_ends_what_waits_and_gives_up_the_batch(
    policy: LoadedPolicy, ask: Asker
) -> None:
    policy.end_token_ids = (policy.forbidden_token_ids[0],)  # no completion ends by itself
    engine = TransformersEngine(policy, max_batch=1)
    asking = [asyncio.create_task(engine.generate(ask(i, max_tokens=3000))) for i in range(3)]
    await until(lambda: engine.gauges()["in_flight"])
    await engine.close()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    assert engine.gauges()["tokens"] < 2000


async def test_a_fault_ends_its_batch_and_the_next_is_served(
    policy: LoadedPolicy, ask: Asker
) -> None:
    ends = policy.end_token_ids
    async with serving(policy) as engine:
        policy.end_token_ids = None  # type: ignore[assignment] # a fault of ours, of any kind
        with pytest.raises(EngineError, match="the batch of 1 failed: TypeError"):
            await engine.generate(ask(1))
        policy.end_token_ids = ends
        assert (await engine.generate(ask(1))).sampled.token_ids


async def test_weights_whose_bringer_is_gone_are_not_taken_and_harm_nothing(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    published = publish(weight_tensors(policy.model), tmp_path, 1)
    goes_on = threading.Event()  # an iteration lasts until then, so that the update has to wait

    def hold(*_: object) -> None:
        assert goes_on.wait(30)

    hook = policy.model.get_input_embeddings().register_forward_pre_hook(hold)
    async with serving(policy, max_batch=1) as engine, asyncio.timeout(PATIENCE_S):
        asking = asyncio.create_task(engine.generate(ask(1)))
        await until(lambda: engine.gauges()["in_flight"])
        updating = asyncio.create_task(engine.update_weights(published.path, 1))
        await until(lambda: engine._swap is not None)
        for task in (updating, asking):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        hook.remove()
        goes_on.set()
        assert (await engine.generate(ask(2))).sampled.version_spans[0].version == 0
        await engine.update_weights(published.path, 2)
        assert engine.policy_version == 2


async def test_a_swap_that_breaks_is_an_error_and_nothing_is_served_from_two_versions(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    def lacking(_path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(list(expected.items())[:-1])

    engine = TransformersEngine(policy, load_weights=lacking)
    assert (await engine.generate(ask(1))).sampled.token_ids
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(KeyError):
            await engine.update_weights(tmp_path, 1)
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask(2))
    await engine.close()


async def test_a_closed_engine_refuses_requests(policy: LoadedPolicy, ask: Asker) -> None:
    async with serving(policy) as engine:
        pass
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask(1))


async def test_gauges_count_what_was_served(policy: LoadedPolicy, ask: Asker) -> None:
    async with serving(policy, max_batch=4) as engine:
        generations = await gather(engine, [ask(i) for i in range(9)])
        gauges = engine.gauges()
    assert gauges["finished"] == 9
    assert gauges["tokens"] == sum(len(generation.sampled.token_ids) for generation in generations)
    assert gauges["waiting"] == 0
    assert 0 < gauges["load_s"] <= gauges["seconds.busy"]
    assert gauges["seconds.starting"] == 0
