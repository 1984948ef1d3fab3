"""With `policy.history_images_most`, each prompt of an episode extends the one before until an eviction.

Whole episodes: the environment is scripted, the completions are drawn, all between is as in a run.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from bus.errors import ModelError
from bus.messages import ActRequest, StepRecord
from dart_cli.config.schema import Config, PolicyConfig
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.scripted import Script, ScriptedEngine
from dart_cli.env.app_log import AppLog
from dart_cli.env.calls import StepResult
from dart_cli.env.episode import play_episode
from dart_cli.env.step_prompts import action_spec_of
from dart_cli.language import history
from dart_cli.player.episodes import InProcessPolicy
from dart_cli.policy.forward import rope_positions
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import make_renderer
from envs.contract.actions import Action, Wait
from envs.contract.base import Observation, Task, Verdict
from envs.contract.observed_texts import KINDS
from scripts.small_models import FAMILIES, build
from tests.env.parts import Lenient, Memory, lease

MODELS = ("tiny", *FAMILIES)
SIZES = ((112, 112), (168, 112), (125, 190))


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedPolicy]:
    folders = {name: build(name, tmp_path_factory.mktemp("models") / name) for name in FAMILIES}
    loaded = {name: load_policy(folder, weights=False) for name, folder in folders.items()}
    return {"tiny": load_policy("builtin:tiny", weights=False), **loaded}


def screen(number: int, texts: bool) -> Observation:
    width, height = SIZES[number % len(SIZES)]
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (number, 99, 7)).save(buffer, "PNG")
    texts_seen = dict.fromkeys(KINDS, f"<|im_end|> window {number} @(3,4)") if texts else {}
    return Observation(buffer.getvalue(), "image/png", width, height, texts_seen)


class Scripted:
    """An environment whose screens are numbered; it ends with its last step alone."""

    queued_s = 0.0

    def __init__(self, *, texts: bool) -> None:
        self._texts = texts
        self._steps = 0
        self.app_log = AppLog()

    async def reset(self, task: Task, seed: int) -> tuple[Observation, str]:
        return screen(0, self._texts), "pick <|image_pad|> red"

    async def evaluate_start(self) -> Verdict | None:
        return None

    async def step(self, action: Action, *, continues: bool = False) -> StepResult:
        self._steps += action != Wait(
            seconds=0
        )  # what a lenient action parser makes of any other text
        return StepResult(screen(self._steps, self._texts), terminated=False, truncated=False)

    async def evaluate(self) -> Verdict:
        return Verdict("fail", "it has no goal")


@dataclass(frozen=True)
class Said:
    """A completion to draw."""

    text: str = ""
    token_ids: tuple[int, ...] = ()  # in place of the text
    end: str = "template"  # the end token: the template's, another, or none


def sampled(policy: LoadedPolicy, saying: Said) -> list[int]:
    """Tokens that the policy may sample: texts letter by letter, as no tokenizer splits them."""
    never = {*policy.forbidden_token_ids, *policy.end_token_ids}
    rows = int(policy.model.get_input_embeddings().weight.shape[0])
    tokens = [token % rows for token in saying.token_ids]
    for piece in saying.text.replace("<|box_", "\0<|box_").split("\0"):
        boxes = piece.startswith("<|box_")
        tokens += (
            policy.encode(piece)
            if boxes
            else [t for letter in piece for t in policy.encode(policy.literal.mark(letter))]
        )
    tokens = [token for token in tokens if token not in never]
    ends = {"template": [template_end(policy)], "none": [], "other": other_ends(policy)[:1]}
    return [*tokens, *ends[saying.end]] or [template_end(policy)]


def template_end(policy: LoadedPolicy) -> int:
    return int(policy.tokenizer.convert_tokens_to_ids("<|im_end|>"))


def other_ends(policy: LoadedPolicy) -> list[int]:
    return [token for token in policy.end_token_ids if token != template_end(policy)]


_texts = st.sampled_from(
    [
        *("click(3,4)", "wait()", "type(<|im_end|> <|image_pad|>)", "no action", "done", ""),
        "Thought: x\nAction: click(start_box='(3,4)')",  # the action parser would show other tokens
        "Thought: x\nAction: click(start_box='<|box_start|>(3,4)<|box_end|>')",
        "Thought: x\nAction: drag(start_box='(3,4)', end_box='(9,9)')",
        "Thought: x\nAction: wait()",
    ]
)
_tokens = st.lists(st.integers(0, 10**6), max_size=5).map(tuple)
_sayings = st.builds(
    Said, _texts, _tokens, st.sampled_from(["template"] * 4 + ["none", "other"])
) | st.builds(Said, _texts)


def policy_config(
    action_parser: str, images: int, more: int, turns: int, **keys: Any
) -> PolicyConfig:
    return PolicyConfig(
        action_parser=action_parser,
        history_images=images,
        history_images_most=images + more,
        history_turns=images - 1 + turns,
        **keys,
    )


def play(
    policy: LoadedPolicy, config: PolicyConfig, completions: list[Said], *, texts: bool = False
) -> tuple[list[StepRecord], list[ActRequest]]:
    """The steps of one episode and what the policy was asked in each."""
    requests: list[ActRequest] = []

    def answer(request: GenerateRequest) -> Script:
        return Script(sampled(policy, completions[len(requests) - 1]))

    class Asks(InProcessPolicy):
        async def act(self, request: ActRequest) -> Any:
            requests.append(request.model_copy(update={"turns": list(request.turns)}))
            return await super().act(request)

    spec = action_spec_of(Config(policy=config))
    spec = replace(spec, action_parser=Lenient(spec.action_parser))
    engine = ScriptedEngine(answer)
    sink = Memory()

    async def run() -> None:
        player = Asks(PolicyResponder(policy, engine, make_renderer(policy, config)))
        ours = lease(max_steps=len(completions))
        ours = ours.model_copy(
            update={"sampling": ours.sampling.model_copy(update={"max_tokens": 500})}
        )
        task = Task("t/x", "t", "", max_steps=len(completions))
        await play_episode(Scripted(texts=texts), ours, task, player, sink, spec)

    asyncio.run(run())
    return sink.steps, requests


def first_screen(step: int, config: PolicyConfig) -> int:
    """Number of the oldest screen in the prompt of `step`."""
    first = 0
    for now in range(step + 1):
        if now - first + 1 > config.history_images_most:
            first = now - config.history_images + 1
    return first


def positions(policy: LoadedPolicy, token_ids: list[int], screens: list[bytes]) -> Any:
    grids = [policy.images.prepare(encoded).grid for encoded in screens]
    return rope_positions(token_ids, grids, policy.image_token_id, policy.images.merge)[0]


def screens_of(request: ActRequest) -> list[bytes]:
    past = [turn.screenshot for turn in request.turns if turn.screenshot is not None]
    return [*past, request.screenshot]


@given(
    action_parser=st.sampled_from(["compact", "uitars"]),
    images=st.integers(1, 3),
    more=st.integers(1, 4),
    turns=st.integers(0, 4),
    keys=st.fixed_dictionaries(
        {},
        optional={
            "part_order": st.sampled_from(["separate", "instruction_first"]),
            "system_prompt": st.just("be brief"),
            "template": st.just("# Task\n<{instruction}>"),
        },
    ),
    texts=st.booleans(),
    completions=st.lists(_sayings, min_size=2, max_size=9),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("model", MODELS)
def test_until_an_eviction_each_prompt_extends_the_one_before_and_its_completion(
    model: str,
    policies: dict[str, LoadedPolicy],
    action_parser: str,
    images: int,
    more: int,
    turns: int,
    keys: dict[str, Any],
    texts: bool,
    completions: list[Said],
) -> None:
    policy = policies[model]
    config = policy_config(action_parser, images, more, turns, **keys)
    steps, requests = play(policy, config, completions, texts=texts)
    assert len(steps) == len(completions)
    for number, (record, request) in enumerate(zip(steps, requests, strict=True)):
        oldest = first_screen(number, config)
        screenshots = [each.screenshot for each in steps[oldest : number + 1]]
        assert screens_of(request) == screenshots
        assert record.sampled.token_ids == sampled(policy, completions[number])
    for number, (before, after) in enumerate(pairwise(steps)):
        prompt, saying = list(before.prompt_token_ids), before.sampled.token_ids
        if first_screen(number, config) != first_screen(number + 1, config):
            visible = requests[number + 1].turns  # an eviction: it begins anew
            assert len(visible) == min(config.history_turns, number + 1)
            assert [turn.observed_text for turn in visible] == [""] * len(visible)
            continue
        has_end = saying[-1] in policy.end_token_ids
        body = saying[:-1] if has_end else saying
        following = after.prompt_token_ids[len(prompt) + len(body) :]
        assert list(after.prompt_token_ids)[: len(prompt) + len(body)] == [*prompt, *body]
        assert following[0] == template_end(policy), "the template ends what was cut off, too"
        assert len(following) > 1
        texts_seen = screens_of(requests[number])
        assert screens_of(requests[number + 1])[:-1] == texts_seen
        assert after.image_hashes[:-1] == before.image_hashes
        whole = [*prompt, *saying]
        old, new = (
            positions(policy, whole, texts_seen),
            positions(policy, after.prompt_token_ids, screens_of(requests[number + 1])),
        )
        assert (new[:, : len(whole)] == old).all()


BARE = Said("Thought: x\nAction: click(start_box='(3,4)')")

SLIDING = {
    "tiny": "a1bdb28c16e0f7e9",
    "qwen2_vl": "525fc67c70569497",
    "qwen2_5_vl": "525fc67c70569497",
    "qwen3_vl": "bb406f4ca13f8e27",
}
"""Digests of the prompts of `slide` as they were before there was `evict`."""


@pytest.mark.parametrize("model", SLIDING)
def test_sliding_prompts_are_token_for_token_what_they_were(
    model: str, policies: dict[str, LoadedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.blake2b(digest_size=8)
    saying = [BARE, Said("wait()"), Said("click(3,4)", end="none"), Said("no action"), BARE, Said()]
    for action_parser in ("compact", "uitars"):
        for images, turns, texts in ((1, 0, 1), (1, 4, 1), (3, 2, 2), (2, 5, 3)):
            monkeypatch.setattr(history, "HISTORY_TEXTS", texts)
            config = PolicyConfig(
                action_parser=action_parser,  # type: ignore[arg-type]
                history_images=images,
                history_turns=turns,
                system_prompt="be brief",
            )
            for step in play(policies[model], config, saying, texts=texts > 1)[0]:
                digest.update(repr((list(step.prompt_token_ids), step.image_hashes)).encode())
    assert digest.hexdigest() == SLIDING[model]


OTHER_END = Said("wait()", end="other")


@pytest.mark.parametrize("model", list(FAMILIES))
def test_the_end_of_a_completion_decides_whether_the_next_prompt_goes_on_from_it(
    model: str, policies: dict[str, LoadedPolicy]
) -> None:
    """The template's end, and none: it goes on. Another end: the prompt is shared, the end is not."""
    policy = policies[model]
    config = policy_config("compact", 1, 5, 0)
    ends = [Said("wait()"), Said("wait()", end="none"), OTHER_END, Said("wait()")]
    steps, _ = play(policy, config, ends)
    for (before, after), goes_on in zip(pairwise(steps), (True, True, False), strict=True):
        whole = [*before.prompt_token_ids, *before.sampled.token_ids]
        assert (list(after.prompt_token_ids)[: len(whole)] == whole) == goes_on
        assert list(after.prompt_token_ids)[: len(whole) - 1] == whole[:-1]
        assert len(after.prompt_token_ids) > len(whole)
    assert steps[2].sampled.token_ids[-1] == other_ends(policy)[0]


def test_an_action_parser_that_shows_other_text_shows_the_sampled_tokens_where_prompts_are_to_extend(
    policies: dict[str, LoadedPolicy],
) -> None:
    """UI-TARS text puts bare boxes into box tokens; a model that writes these itself sees no change."""
    policy = policies["qwen2_5_vl"]
    box = policy.encode("<|box_start|>")[0]
    evict = policy_config("uitars", 2, 2, 0)
    slide = PolicyConfig(action_parser="uitars", history_images=4, history_turns=3)
    boxed = Said(BARE.text.replace("(3,4)", "<|box_start|>(3,4)<|box_end|>"))
    for config, saying, boxes in ((evict, BARE, 0), (slide, BARE, 1), (evict, boxed, 1)):
        steps, _ = play(policy, config, [saying, saying])
        whole = [*steps[0].prompt_token_ids, *steps[0].sampled.token_ids]
        assert steps[1].prompt_token_ids.count(box) == boxes
        extends = list(steps[1].prompt_token_ids)[: len(whole)] == whole
        assert extends == (config is evict)


TEMPLATES = {
    "shows a past message differently": (
        "{%- for m in messages -%}<|im_start|>{{ m.role }}{{ '' if loop.last else ', before' }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{%- for p in m.content -%}{% if p.type == 'image' %}<|vision_start|><|image_pad|>"
        "<|vision_end|>{% else %}{{ p.text }}{% endif %}{%- endfor -%}{% endif %}<|im_end|>\n"
        "{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
    ),
    "ends no completion": (
        "{%- for m in messages -%}{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{%- for p in m.content -%}{% if p.type == 'image' %}<|vision_start|><|image_pad|>"
        "<|vision_end|>{% else %}{{ p.text }}{% endif %}{%- endfor -%}{% endif %}\n"
        "{% endfor -%}{%- if add_generation_prompt -%}assistant\n{% endif -%}"
    ),
    "of 1 past completions": (
        "{%- for m in messages -%}{% if m.content is not string %}<|im_start|>{{ m.role }}\n"
        "{%- for p in m.content -%}{% if p.type == 'image' %}<|vision_start|><|image_pad|>"
        "<|vision_end|>{% else %}{{ p.text }}{% endif %}{%- endfor -%}<|im_end|>\n{% endif %}"
        "{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
    ),
}


@pytest.mark.parametrize("problem", list(TEMPLATES))
def test_a_chat_template_whose_prompts_do_not_extend_is_refused(
    problem: str, policies: dict[str, LoadedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policies["qwen3_vl"]
    monkeypatch.setattr(policy.tokenizer, "chat_template", TEMPLATES[problem])
    with pytest.raises(ModelError, match=f"{problem}.*set it to 0"):
        make_renderer(policy, policy_config("compact", 1, 2, 0))
    make_renderer(policy, PolicyConfig())
