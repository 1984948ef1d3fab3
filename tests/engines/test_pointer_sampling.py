"""Promises of an engine whose policy points: what is forced, what is drawn, and that its numbers are exact."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from bus.errors import EngineError
from bus.messages import (
    ActRequest,
    ChatMessage,
    ChatPart,
    Completion,
    PointerCandidate,
    SampledTokens,
    Sampling,
    Turn,
    VersionSpan,
)
from dart_cli.algo.regions import ranked_places
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.responder import PolicyPromptEncoder, PolicyResponder
from dart_cli.engines.sampling import uniform_numbers
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.engines.verified_responder import CANDIDATES, VerifiedResponder
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.pointer_tokens import TRIPLE, PointerTokens
from dart_cli.policy.forward import last_hidden
from dart_cli.policy.loader import LoadedPolicy, load_policy, weight_tensors
from dart_cli.policy.pointer_folder import add_pointer
from dart_cli.policy.prompt import PromptRenderer, pointer_text
from dart_cli.policy.verifier import VerifierSpec, load_verifier, open_screenshot
from dart_cli.weights.file import load
from tests.devices import DEVICES
from tests.engines.conftest import screenshot
from tests.engines.exact import (
    fresh_numbers,
    pointer_logits,
    put,
    random_versions,
    rounding,
)
from tests.weights.sets import publish

Asker = Callable[..., GenerateRequest]


@pytest.fixture(scope="module")
def pointer_folder(untrained_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pointing") / "untrained"
    add_pointer(untrained_folder, folder, seed=3)
    return folder


@pytest.fixture
def policy(pointer_folder: Path) -> LoadedPolicy:
    return pointing_policy(pointer_folder)


def pointing_policy(folder: Path) -> LoadedPolicy:
    """It points now and then, and its head prefers some patches to others."""
    policy = load_policy(folder, pointing="pointer")
    assert policy.pointer_head is not None
    with torch.no_grad():
        policy.pointer_head.query_out.weight *= 16
        prompt = PromptRenderer(policy).render("click the red button", [], screenshot(1))
        inputs = policy.inputs([prompt.token_ids], [prompt.images])
        state = last_hidden(policy.model, inputs, last=1)[0, 0]
        policy.model.get_output_embeddings().weight[tokens_of(policy).start] = 0.12 * state
    return policy


def tokens_of(policy: LoadedPolicy) -> PointerTokens:
    assert policy.pointer is not None
    return policy.pointer


def pointer_request(policy: LoadedPolicy, text: str = "click(") -> SampledTokens:
    """A partial that must point next."""
    token_ids = [*policy.encode(text), *tokens_of(policy).triple[:2]]
    return part(token_ids, [])


def part(token_ids: list[int], patches: list[int]) -> SampledTokens:
    return SampledTokens(
        token_ids=token_ids,
        behaviour_logprobs=[-1.0] * len(token_ids),
        entropies=[1.0] * len(token_ids),
        version_spans=[VersionSpan(version=0, start=0, end=len(token_ids))],
        patches=patches,
    )


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
    sampled = generation.sampled
    told = sampled.behaviour_logprobs, sampled.entropies
    fresh = fresh_numbers(policy, request, sampled.token_ids, temperature, sampled.patches)
    for numbers, expected in zip(told, fresh, strict=True):
        torch.testing.assert_close(torch.tensor(numbers), expected, atol=rounding(policy), rtol=0)


def patches_of(generation: Generation) -> list[int]:
    return [patch for patch in generation.sampled.patches if patch >= 0]


@torch.inference_mode()
def shares(
    policy: LoadedPolicy, request: GenerateRequest, before: list[int]
) -> NDArray[np.float64]:
    """p [rows, columns] of a pointer after the completion's tokens `before`, `pad` included."""
    inputs = policy.inputs([request.prompt_token_ids + before], [request.images])
    hidden = last_hidden(policy.model, inputs, last=1)[0, 0]
    scores = pointer_logits(policy, request, hidden).double().numpy()
    p = np.exp(scores - scores.max())
    grid = policy.images.prepare(request.images[-1]).grid
    return (p / p.sum()).reshape(grid[1] // policy.images.merge, -1)


async def test_numbers_are_exact_in_mixed_batches_and_after_a_live_update(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    requests = [ask(i, past_images=i % 3, temperature=0.8, max_tokens=20) for i in range(10)]
    versions = random_versions(policy, 2)
    published = publish(versions[1], tmp_path, 1)
    async with serving(policy, max_batch=4) as engine:
        first = await gather(engine, requests)
        await engine.update_weights(published.path, 1)
        second = await gather(engine, requests)
    for generations, weights in ((first, versions[0]), (second, versions[1])):
        put(policy, weights)
        for request, generation in zip(requests, generations, strict=True):
            assert_exact(policy, request, generation, 0.8)
    pointed = [bool(patches_of(each)) for each in first + second]
    assert any(pointed)
    assert not all(pointed)
    shown = [
        (len(each.images), bool(patches_of(one))) for each, one in zip(requests, first, strict=True)
    ]
    assert (3, True) in shown  # and into the last of several


@pytest.mark.parametrize("device", DEVICES, indirect=True)
async def test_a_device_points_where_a_cpu_does(
    policy: LoadedPolicy, ask: Asker, device: str, pointer_folder: Path
) -> None:
    there = load_policy(pointer_folder, device=device, pointing="pointer")
    for name, tensor in weight_tensors(there.model).items():
        tensor.copy_(weight_tensors(policy.model)[name])
    start = pointer_request(policy)
    requests = [
        replace(ask(seed, temperature=seed % 2, max_tokens=4), partial=start) for seed in range(4)
    ]
    async with serving(there) as engine:
        generations = await gather(engine, requests)
    for request, generation in zip(requests, generations, strict=True):
        sampled = generation.sampled
        logprobs, entropies = fresh_numbers(
            policy, request, sampled.token_ids, 1.0, sampled.patches
        )
        assert abs(sampled.behaviour_logprobs[-1] - float(logprobs[-1])) < 1e-3
        assert abs(sampled.entropies[-1] - float(entropies[-1])) < 1e-3
        assert len(patches_of(generation)) == 1


async def test_pad_and_end_are_forced_and_come_from_nowhere_else(
    policy: LoadedPolicy, ask: Asker
) -> None:
    tokens = tokens_of(policy)
    async with serving(policy) as engine:
        generations = await gather(engine, [ask(i, max_tokens=21) for i in range(12)])
    seen = 0
    for generation in generations:
        sampled = generation.sampled
        patches = sampled.patches or [-1] * len(sampled)
        for position, token in enumerate(sampled.token_ids):
            before = sampled.token_ids[position - 1] if position else -1
            assert (token == tokens.pad) == (before == tokens.start)
            assert (token == tokens.end) == (before == tokens.pad) == (patches[position] >= 0)
            if token == tokens.pad:
                assert sampled.behaviour_logprobs[position] == sampled.entropies[position] == 0.0
                seen += 1
        maps = [each.position for each in generation.pointed]
        assert maps == [position for position, patch in enumerate(patches) if patch >= 0]
    assert seen > 5


async def test_a_patch_is_the_inverse_cdf_at_the_number_of_its_position(
    policy: LoadedPolicy, ask: Asker
) -> None:
    start = pointer_request(policy)
    request = replace(ask(4, past_images=1, temperature=0.7, max_tokens=9), partial=start)
    p = shares(policy, request, start.token_ids).ravel() ** (1 / 0.7)
    seeds = range(60)
    async with serving(policy) as engine:
        generations = await gather(
            engine,
            [
                replace(request, sampling=Sampling(temperature=0.7, max_tokens=9, seed=seed))
                for seed in seeds
            ],
        )
    position = len(start)
    for seed, generation in zip(seeds, generations, strict=True):
        share = uniform_numbers(seed, 9)[position]
        expected = np.searchsorted(np.cumsum(p) / p.sum(), share, side="right")
        assert generation.sampled.patches[position] == expected
    assert len({generation.sampled.patches[position] for generation in generations}) > 5


async def test_a_map_has_the_shares_and_the_regions(policy: LoadedPolicy, ask: Asker) -> None:
    start = pointer_request(policy)
    request = replace(ask(2, temperature=0.5, max_tokens=4), partial=start)
    async with serving(policy) as engine:
        [pointed] = (await engine.generate(request)).pointed
    p = shares(policy, request, start.token_ids)
    assert (pointed.position, pointed.rows, pointed.columns) == (len(start), *p.shape)
    heat = np.frombuffer(pointed.heat, np.uint8).reshape(p.shape)
    assert np.abs(heat - 255 * p / p.max()).max() < 0.51
    scores = [each.score for each in pointed.candidates]
    assert scores == sorted(scores, reverse=True)
    assert 0.3 * p.max() < scores[0] <= p.max() + 1e-6


async def test_greedy_points_at_the_centre_of_the_best_region(
    policy: LoadedPolicy, ask: Asker
) -> None:
    start = pointer_request(policy)
    request = replace(ask(5, temperature=0.0, max_tokens=8), partial=start)
    async with serving(policy) as engine:
        generation = await engine.generate(request)
    best = generation.pointed[0].candidates[0]
    p = shares(policy, request, start.token_ids)
    cell = int(best.y * p.shape[0]), int(best.x * p.shape[1])
    patch = generation.sampled.patches[len(start)]
    assert patch == cell[0] * p.shape[1] + cell[1]
    logprob = generation.sampled.behaviour_logprobs[len(start)]
    assert logprob == pytest.approx(float(np.log(p[cell])), abs=1e-5)  # not tempered


async def test_a_completion_continues_the_same_wherever_it_was_cut(
    policy: LoadedPolicy, ask: Asker
) -> None:
    request = replace(
        ask(3, past_images=1, max_tokens=14), partial=pointer_request(policy, "drag(")
    )
    async with serving(policy) as engine:
        whole = await engine.generate(request)
        sampled, first = whole.sampled, len(pointer_request(policy, "drag("))
        cuts = range(first - 1, len(sampled))
        again = await gather(
            engine,
            [
                replace(
                    request,
                    partial=SampledTokens(
                        token_ids=sampled.token_ids[:cut],
                        behaviour_logprobs=sampled.behaviour_logprobs[:cut],
                        entropies=sampled.entropies[:cut],
                        version_spans=[VersionSpan(version=0, start=0, end=cut)],
                        patches=sampled.patches[:cut],
                    ),
                    pointed=[each for each in whole.pointed if each.position < cut],
                )
                for cut in cuts
            ],
        )
    assert patches_of(whole)
    for generation in again:
        assert generation.sampled.token_ids == sampled.token_ids
        assert generation.sampled.patches == sampled.patches
        assert [each.position for each in generation.pointed] == [
            each.position for each in whole.pointed
        ]
        told = np.array(generation.sampled.behaviour_logprobs)
        assert np.abs(told - sampled.behaviour_logprobs)[first:].max() < 1e-5


@pytest.mark.parametrize(
    ("token_ids", "patches", "said"),
    [
        (("pad",), [], "no pointer"),
        (("start", "end"), [], "no pointer"),
        (("start", "text"), [], "no pointer"),
        (("start", "pad", "end"), [], "no pointer"),
        (("start", "pad", "end"), [-1, -1, -1], "no pointer"),
        (("start", "pad", "end"), [-1, 3, -1], "no pointer"),
        (("start", "pad", "end"), [-1, -1, 99999], "0 to 35"),
    ],
)
async def test_a_partial_with_what_is_no_pointer_is_refused(
    policy: LoadedPolicy, ask: Asker, token_ids: tuple[str, ...], patches: list[int], said: str
) -> None:
    tokens = tokens_of(policy)
    ids = {"start": tokens.start, "pad": tokens.pad, "end": tokens.end, "text": 65}
    partial = part([ids[each] for each in token_ids], patches)
    async with serving(policy) as engine:
        with pytest.raises(EngineError, match=said):
            await engine.generate(replace(ask(3), partial=partial))


async def test_a_policy_that_points_needs_a_screenshot(policy: LoadedPolicy, ask: Asker) -> None:
    async with serving(policy) as engine:
        with pytest.raises(EngineError, match="no screenshot"):
            await engine.generate(replace(ask(1), images=[], prompt_token_ids=[65, 66]))


async def test_a_folder_with_a_head_that_writes_numbers_never_points(
    pointer_folder: Path, ask: Asker
) -> None:
    policy = load_policy(pointer_folder)
    tokens = tokens_of(policy)
    async with serving(policy) as engine:
        generations = await gather(engine, [ask(i, max_tokens=16) for i in range(8)])
        with pytest.raises(EngineError, match="never samples"):
            await engine.generate(replace(ask(1), partial=part([tokens.start], [])))
    for generation in generations:
        assert not generation.sampled.patches
        assert not set(tokens.triple).intersection(generation.sampled.token_ids)


# --- texts ------------------------------------------------------------------------------------


def screen(width: int = 168, height: int = 168, **changes: object) -> ActRequest:
    buffer = io.BytesIO()
    Image.effect_noise((width, height), 90).convert("RGB").save(buffer, "PNG")
    values: dict[str, object] = {
        "trajectory_id": "t",
        "step": 0,
        "instruction": "click the red button",
        "turns": [],
        "screenshot": buffer.getvalue(),
        "width": width,
        "height": height,
        "sampling": Sampling(temperature=1.0, max_tokens=12, seed=7),
    }
    return ActRequest(**(values | changes))  # type: ignore[arg-type]


def renderer(policy: LoadedPolicy) -> PromptRenderer:
    return PromptRenderer(policy, points=pointer_text(policy, "compact"))


async def test_a_text_has_numbers_in_the_drawn_patch_or_at_the_regions_centre(
    policy: LoadedPolicy,
) -> None:
    request = screen(308, 168, partial=pointer_request(policy))
    encoder = PolicyPromptEncoder(policy, renderer(policy))
    async with serving(policy) as engine:
        responder = PolicyResponder(policy, engine, renderer(policy))
        for temperature in (1.0, 0.0):
            asked = request.model_copy(
                update={"sampling": Sampling(temperature=temperature, max_tokens=4, seed=7)}
            )
            completion = await responder.answer(asked)
            [pointed] = completion.pointed
            assert completion.text.startswith("click(")
            x, y = (int(each) for each in completion.text.removeprefix("click(").split(","))
            read = encoder.encode_completion(f"click({x},{y})", asked)
            position = pointed.position
            assert read.patches[position] == completion.sampled.patches[position]
            if temperature == 0:
                best = pointed.candidates[0]
                assert abs(x - 1000 * best.x) <= 4  # the centre, and the pixel's in the same patch
                assert abs(y - 1000 * best.y) <= 4
            assert (await responder.answer(asked)).text == completion.text


class Closing(PolicyResponder):
    """Its untrained policy's clicks are actions: the bracket is closed."""

    async def answer(self, request: ActRequest) -> Completion:
        completion = await super().answer(request)
        return completion.model_copy(update={"text": f"{completion.text.partition(')')[0]})"})


class Likes:
    """A verifier that likes the nth place that it is asked about."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.asked: list[tuple[str, int, int]] = []

    def score(self, screenshot: Image.Image, instruction: str, x: int, y: int) -> float:
        self.asked.append((instruction, x, y))
        assert (x, y) < screenshot.size
        return 0.9 if len(self.asked) == self.nth else 0.1 * len(self.asked) / 100


@pytest.mark.parametrize("nth", [1, 3, 999])
async def test_a_verifier_moves_greedy_clicks_alone(policy: LoadedPolicy, nth: int) -> None:
    request = screen(308, 168, partial=pointer_request(policy))
    greedy = Sampling(temperature=0.0, max_tokens=4, seed=7)
    likes = Likes(nth)
    async with serving(policy) as engine:
        plain = Closing(policy, engine, renderer(policy))
        verified = VerifiedResponder(plain, likes, 0.8)  # type: ignore[arg-type]
        assert (await verified.answer(request)).text == (await plain.answer(request)).text
        assert not likes.asked  # that was sampled
        asked = request.model_copy(update={"sampling": greedy})
        image = ChatPart(is_image=True)
        told = {"messages": [ChatMessage(role="user", parts=[image])], "instruction": ""}
        spoken = asked.model_copy(update=told)
        assert (await verified.answer(spoken)).text == (await plain.answer(spoken)).text
        assert not likes.asked  # nor was it told what is meant
        before, after = await plain.answer(asked), await verified.answer(asked)
    assert after.sampled == before.sampled
    taken = nth - 1 if nth <= len(likes.asked) else len(likes.asked) - 1  # else the best
    assert len(likes.asked) <= min(nth, CANDIDATES)
    instruction, x, y = likes.asked[taken]
    assert instruction == "click the red button"
    screen_map = make_coordinate_map("thousandths", 308, 168)
    numbers = after.text.removeprefix("click(").split(")")[0].split(",")
    assert screen_map.to_screen(int(numbers[0]), int(numbers[1])) == (x, y)
    assert (after.text == before.text) == (taken == 0)
    [first, *others] = after.pointed[0].candidates
    assert abs(first.x * 308 - x) <= 1.5
    assert len(others) + (taken < len(before.pointed[0].candidates)) >= len(
        before.pointed[0].candidates
    )


async def test_a_real_verifier_is_asked_about_each_candidate(
    policy: LoadedPolicy, untrained_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "verifier"
    shutil.copytree(untrained_folder, folder)
    VerifierSpec(radius=4, width=2, reach=40).write(folder)
    verifier = load_verifier(folder, "float32", torch.device("cpu"))
    asked = screen(partial=pointer_request(policy)).model_copy(
        update={"sampling": Sampling(temperature=0.0, max_tokens=4, seed=7)}
    )
    async with serving(policy) as engine:
        plain = Closing(policy, engine, renderer(policy))
        responder = VerifiedResponder(plain, verifier, 1.0)
        completion = await responder.answer(asked)
    best = completion.pointed[0].candidates[0]
    [click] = responder.prompt_encoder.clicks(asked, [best])
    opened = open_screenshot(asked.screenshot)
    places = ranked_places(
        np.frombuffer(completion.pointed[0].heat, np.uint8).reshape(
            completion.pointed[0].rows, completion.pointed[0].columns
        )
        / 255,
        CANDIDATES,
    )
    candidates = [PointerCandidate(x=x, y=y, score=score) for x, y, score in places]
    scores = {
        at: verifier.score(opened, asked.instruction, *at)
        for at in responder.prompt_encoder.clicks(asked, candidates)
    }
    assert click == max(scores, key=lambda at: scores[at])


def test_a_solution_has_a_pointer_for_each_point_with_the_patch_that_holds_it(
    policy: LoadedPolicy,
) -> None:
    encoder, tokens = PolicyPromptEncoder(policy, renderer(policy)), tokens_of(policy)
    sampled = encoder.encode_completion("drag(0,0,999,500)", screen(168, 168))
    assert policy.decode(sampled.token_ids) == f"drag({TRIPLE},{TRIPLE})"
    assert sampled.token_ids[-1] in policy.end_token_ids
    patches = dict(zip(sampled.token_ids, sampled.patches, strict=True))
    assert [each for each in sampled.patches if each >= 0] == [0, 23]
    assert patches[tokens.end] == 23
    assert encoder.encode_completion("type(1,2)", screen()).patches == []
    with pytest.raises(EngineError, match="points at nothing"):
        PolicyPromptEncoder(
            policy, PromptRenderer(policy, points=pointer_text(policy, "uitars"))
        ).encode_completion("Thought: \nAction: click(start_box='(5000,1)')", screen())


def test_a_past_turn_is_shown_with_pointers_whether_it_was_sampled_or_written(
    policy: LoadedPolicy,
) -> None:
    tokens = tokens_of(policy)
    sampled = [*policy.encode("click("), *tokens.triple, *policy.encode(")")]
    for turn in (Turn(text="click(5,6)"), Turn(text="click(5,6)", token_ids=sampled)):
        prompt = renderer(policy).render("click it", [turn], screenshot(1))
        shown = policy.tokenizer.decode(prompt.token_ids)
        assert f"click({TRIPLE})" in shown
        assert "5,6" not in shown
    plain = renderer(policy).render("click it", [Turn(text=f"type({TRIPLE})")], screenshot(1))
    assert not set(tokens.triple).intersection(plain.token_ids)  # only text, whoever wrote it
