"""What a model is asked, and what becomes of its texts and pointers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bus.errors import ConfigError, EngineError
from bus.messages import ActRequest, Completion, SampledTokens
from bus.packed import int32s
from dart_cli.algo.regions import regions
from dart_cli.config.schema import Config
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.grounding.formats import format_of, grounding_config, opening_of
from dart_cli.grounding.items import Box, Item, Picture
from dart_cli.grounding.scorers import PointerScorer, TextScorer
from dart_cli.language.coordinates import CoordinateMap, make_coordinate_map
from dart_cli.policy.forward import image_features, last_hidden
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer, pointer_text
from tests.grounding.sets import BOX, SIZE, screen


class Told:
    """Answers with the next of these texts."""

    def __init__(self, *texts: str, stop: str = "end") -> None:
        self.texts = list(texts)
        self.stop = stop
        self.requests: list[ActRequest] = []

    async def preload_images(self, request: ActRequest) -> object:
        return request.screenshot

    async def answer(self, request: ActRequest) -> Completion:
        self.requests.append(request)
        return Completion.model_validate(
            {
                "prompt_token_ids": int32s([]),
                "sampled": SampledTokens(
                    token_ids=[], behaviour_logprobs=[], entropies=[], version_spans=[]
                ),
                "text": self.texts[len(self.requests) - 1],
                "stop": self.stop,
                "queue_s": 0.0,
                "engine_s": 0.0,
            }
        )


def thousand(width: int, height: int) -> CoordinateMap:
    return make_coordinate_map("thousand", width, height)


def scorer(told: Any, candidates: int, map_of: Any = thousand) -> TextScorer:
    return TextScorer(told, format_of("point", ""), map_of, Config(), candidates)


@pytest.fixture
def item(tmp_path: Path) -> Item:
    screen(tmp_path / "a.png")
    return Item("s[0]", Picture(tmp_path / "a.png"), SIZE, "click the red button", Box(*BOX))


async def test_the_first_candidate_is_greedy_and_the_others_are_sampled_apart(item: Item) -> None:
    told = Told("(500,500)", "no idea", "(250,500)")
    answer = await scorer(told, 3).answer(item)
    assert answer.points == [(100, 50), None, (50, 50)]
    assert answer.texts == told.texts
    assert (answer.refused, answer.problem) == (False, "")
    assert [request.sampling.temperature for request in told.requests] == [0.0, 1.0, 1.0]
    assert len({request.sampling.seed for request in told.requests}) == 3
    for request in told.requests:
        assert request.screenshot == item.image.read_bytes()
        assert (request.width, request.height) == SIZE
        assert (request.instruction, request.turns) == (item.instruction, [])
    again = Told(*told.texts)
    await scorer(again, 3).answer(item)
    seeds = [[request.sampling.seed for request in each.requests] for each in (told, again)]
    assert seeds[0] == seeds[1]


async def test_only_the_first_answer_refuses(item: Item) -> None:
    answer = await scorer(Told("(-1,-1)", "(500,500)"), 2).answer(item)
    assert (answer.refused, answer.points[0]) == (True, None)
    answer = await scorer(Told("(500,500)", "(-1,-1)"), 2).answer(item)
    assert (answer.refused, answer.points[1]) == (False, None)


async def test_a_text_that_was_cut_off_says_so(item: Item) -> None:
    answer = await scorer(Told("I think that", stop="length"), 1).answer(item)
    assert answer.points == [None]
    assert answer.problem.endswith("it was cut off at rollout.max_tokens")


async def test_a_screen_that_the_model_cannot_see_has_no_answer(item: Item) -> None:
    """A strip longer than 200 : 1 has no size in the pixels of a resized screenshot."""

    def resized(width: int, height: int) -> CoordinateMap:
        return make_coordinate_map("resized", 300 * width, height)

    with pytest.raises(EngineError, match="too long a strip"):
        await scorer(Told(), 1, resized).answer(item)


async def test_a_model_that_points_gives_its_candidates_in_one_pass(
    item: Item, pointer_folder: Callable[[str], Path]
) -> None:
    """Whatever it would have written: this one was never trained to point."""
    policy = load_policy(pointer_folder("builtin:tiny"), pointing="pointer")
    assert policy.pointer_head is not None
    with torch.no_grad():
        policy.pointer_head.query_out.weight *= 30
    engine = TransformersEngine(policy)
    renderer = PromptRenderer(policy, points=pointer_text(policy, "compact"))
    responder = PolicyResponder(policy, engine, renderer)
    try:
        answer = await PointerScorer(responder, "click(", 4).answer(item)
        load = engine.gauges()
    finally:
        await engine.close()
    assert (load["prefills"], load["tokens"]) == (1, 1)
    p = shares(policy, item)
    best = regions(p, top=1)[0]
    assert answer.points[0] is not None
    x, y = answer.points[0]
    assert abs(x - best.x * SIZE[0]) <= 1
    assert abs(y - best.y * SIZE[1]) <= 1
    assert len(answer.points) == len(answer.scores) == 4
    assert abs(answer.scores[0] - best.score / p.max()) < 0.01
    assert not answer.refused


@torch.inference_mode()
def shares(policy: LoadedPolicy, item: Item) -> NDArray[np.float64]:
    """p [rows, columns] after `click(`, of one forward pass without an engine."""
    assert policy.pointer is not None
    assert policy.pointer_head is not None
    screenshot = item.image.read_bytes()
    prompt = PromptRenderer(policy).render(item.instruction, [], screenshot)
    said = [*policy.encode("click("), *policy.pointer.triple[:2]]
    inputs = policy.inputs([prompt.token_ids + said], [prompt.images])
    hidden = last_hidden(policy.model, inputs, last=1)[0]
    image = policy.images.prepare(screenshot)
    visual = image_features(policy.model, [image]).embeds[0]
    scores = policy.pointer_head(visual, hidden)[0].double().numpy()
    p = np.exp(scores - scores.max())
    shaped: NDArray[np.float64] = (p / p.sum()).reshape(image.grid[1] // policy.images.merge, -1)
    return shaped


def test_a_pointer_stands_where_the_format_has_its_point() -> None:
    assert opening_of(format_of("compact", "")) == "click("
    assert opening_of(format_of("uitars", "")).endswith("Action: click(start_box='")
    assert opening_of(format_of("gui-actor", "")).endswith("pyautogui.click(")
    assert opening_of(format_of("toolcall", "")).endswith('"coordinate": ')
    assert opening_of(format_of("pyautogui", "")).endswith("pyautogui.click(")
    with pytest.raises(ConfigError, match="--action-parser point has no place for a pointer"):
        opening_of(format_of("point", ""))


def test_a_model_that_points_is_not_told_how_to_refuse(
    pointer_folder: Callable[[str], Path],
) -> None:
    folder = str(pointer_folder("qwen2_vl"))
    pointing = ["policy.pointing=pointer"]
    config, _ = grounding_config(folder, "uitars", pointing, refusals=True)
    assert "call_user" not in config.policy.template
    config, _ = grounding_config(folder, "uitars", [], refusals=True)
    assert "call_user" in config.policy.template
    grounding_config(folder, "gui-actor", pointing, refusals=True)
    with pytest.raises(ConfigError, match=r"has no numbers; add --set policy\.pointing=pointer"):
        grounding_config(folder, "gui-actor", [], refusals=False)
