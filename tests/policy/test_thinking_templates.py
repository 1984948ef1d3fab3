"""Chat templates that begin a reply, most of them within a thought: one past turn in rollouts, tune, serve and train."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bus.errors import ModelError, PromptError
from bus.messages import ActRequest, ChatMessage, ChatPart, Sampling, Turn
from bus.packed import float64s, int32s
from dart_cli.config.schema import Config, PolicyConfig
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep
from dart_cli.engines.responder import PolicyPromptEncoder
from dart_cli.grounding.formats import format_of, read_point
from dart_cli.grounding.items import Box, Item, Picture, Polygon
from dart_cli.language.coordinates import AS_IT_IS
from dart_cli.language.parsers import make_action_parser
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer, make_renderer
from dart_cli.tune.episodes import EPISODES, ActionExamples, read_episodes
from dart_cli.tune.examples import TextAnswers
from envs.contract.actions import Click, Wait
from scripts.small_models import build

USER = (
    "{%- for m in messages %}{%- if m.role != 'assistant' %}"
    "{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- for part in m.content %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- else %}"
)
END = "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}NEWEST{%- endif %}"
THINKING = "{{- '<|im_start|>assistant\n<think>\n' }}"
PLAIN = "{{- '<|im_start|>assistant\n' }}"


def template(past: str, newest: str) -> str:
    said = past.replace("TEXT", "m.content")
    return USER + said + "{{- '<|im_end|>\n' }}" + END.replace("NEWEST", newest)


STRIPPED = "m.content.split('</think>')[-1].lstrip('\n')"
TEMPLATES = {
    "takes past thoughts out": template(PLAIN + "{{- " + STRIPPED + " }}", THINKING),
    "keeps past thoughts": template(
        "{{- '<|im_start|>assistant\n' + ('' if '<think>' in TEXT else '<think>\n') + TEXT }}", THINKING
    ),
    "shows empty thoughts": template(
        "{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + " + STRIPPED + " }}", THINKING
    ),
    "keeps thoughts behind the last question": template(
        "{%- if loop.index0 > messages | length %}" + THINKING + "{{- TEXT }}{%- else %}"
        + PLAIN + "{{- " + STRIPPED + " }}{%- endif %}",
        THINKING,
    ),
    "begins in another tag": template(
        PLAIN + "{{- TEXT }}", THINKING.replace("think", "thinking")
    ),
    "begins past replies with a blank": template("{{- '<|im_start|>assistant: ' + TEXT }}", "{{- '<|im_start|>assistant:' }}"),
    "begins the newest reply with a blank": template("{{- '<|im_start|>assistant:' + TEXT }}", "{{- '<|im_start|>assistant: ' }}"),
    "takes blanks off": template(PLAIN + "{{- TEXT.strip() }}", PLAIN),
    "has an empty thought already": template(PLAIN + "{{- TEXT }}", "{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"),
}  # fmt: skip
TEMPLATES |= {
    name: (Path(__file__).parent / "templates" / f"{file}.jinja").read_text(encoding="utf-8")
    for name, file in (("has Qwen3.5's rules", "qwen3_5"), ("has Qwen3.8's rules", "qwen3_8"))
}
OPEN = {name for name, text in TEMPLATES.items() if text.endswith("<think>\n' }}{%- endif %}")} | {
    "begins in another tag",
    "has Qwen3.5's rules",
    "has Qwen3.8's rules",
}


def screenshot(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (168, 168), (shade, shade, shade)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    folder = build("qwen3_vl", tmp_path_factory.mktemp("models") / "qwen3_vl")
    return load_policy(folder, weights=False)


@pytest.fixture(params=list(TEMPLATES))
def thinking(policy: LoadedPolicy, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a template that the policy has."""
    before = policy.tokenizer.chat_template
    policy.tokenizer.chat_template = TEMPLATES[request.param]
    yield request.param
    policy.tokenizer.chat_template = before


CONFIG = PolicyConfig(
    action_parser="toolcall", coordinates="thousand", history_turns=4, history_images=5, template="{instruction}"
)  # fmt: skip


def completions(renderer: PromptRenderer) -> list[str]:
    """What a policy writes behind the beginning of its reply, in two steps."""
    action_parser = make_action_parser("toolcall")
    texts = []
    for action, thought in ((Click(x=5, y=6), "It is left."), (Wait(), "")):
        closed = renderer.closed_thought(thought)
        texts.append(closed + action_parser.format(action, AS_IT_IS, "" if closed else thought))
    return texts


def past_of(texts: list[str], sampled: list[list[int]]) -> list[Turn]:
    return [
        Turn(text=text, token_ids=token_ids, screenshot=screenshot(number))
        for number, (text, token_ids) in enumerate(zip(texts, sampled, strict=True))
    ]


def chat(texts: list[str], sampled: list[list[int]]) -> list[ChatMessage]:
    """The same as messages of another program."""
    image = ChatPart(is_image=True)
    messages = [ChatMessage(role="user", parts=[ChatPart(text="do it"), image])]
    for text, token_ids in zip(texts, sampled, strict=True):
        said = ChatMessage(role="assistant", parts=[ChatPart(text=text)], token_ids=token_ids)
        messages += [said, ChatMessage(role="user", parts=[image])]
    return messages


def test_a_past_turn_is_the_prompt_that_asked_and_the_tokens_that_answered(
    policy: LoadedPolicy, thinking: str
) -> None:
    renderer = make_renderer(policy, CONFIG)
    texts = completions(renderer)
    assert all(text.count("</think") == (thinking in OPEN) for text in texts)
    answers = [policy.encode_completion(text) for text in texts]
    odd = [policy.encode(letter)[0] for letter in texts[1]]  # no tokenizer's own split
    sampled = [answers[0], [*odd, answers[1][-1]]]
    turns = past_of(texts, sampled)
    prompts = [
        renderer.render("do it", turns[:number], screenshot(number)).token_ids
        for number in range(3)
    ]
    for number in range(2):
        so_far = [*prompts[number], *sampled[number]]
        assert prompts[number + 1][: len(so_far)] == so_far
    images = [screenshot(number) for number in range(3)]
    assert renderer.render_messages(chat(texts, sampled), images).token_ids == prompts[2]
    assert renderer.extension_problem() == ""

    steps = [
        BatchStep(
            group_id="g",
            trajectory_id="t",
            step=number,
            prompt_token_ids=int32s(prompts[number]),
            token_ids=int32s(sampled[number]),
            image_hashes=["a", "b"][: number + 1],
            behaviour_logprobs=float64s([0.0] * len(sampled[number])),
            version_spans=[],
            advantage=1.0,
            weight=1.0,
        )
        for number in range(2)
    ]
    [chain], samples = chained(steps)
    assert chain.token_ids.tolist() == [*prompts[1], *sampled[1]]
    assert len(samples) == 2


def test_a_text_whose_tokens_are_unknown_stands_as_if_it_had_been_sampled(
    policy: LoadedPolicy, thinking: str
) -> None:
    renderer = make_renderer(policy, CONFIG)
    texts = completions(renderer)
    sampled, unknown = [policy.encode_completion(text) for text in texts], [[], []]  # type: ignore[var-annotated]
    prompt = renderer.render("do it", past_of(texts, sampled), screenshot(2))
    assert renderer.render("do it", past_of(texts, unknown), screenshot(2)) == prompt
    assert renderer.render_messages(chat(texts, unknown), prompt.images) == prompt
    if thinking in OPEN:  # as an agent may show it that keeps whole messages
        tag = "thinking" if thinking == "begins in another tag" else "think"
        whole = [f"<{tag}>\n{text}" for text in texts]
        assert renderer.render_messages(chat(whole, unknown), prompt.images) == prompt


def test_demonstrations_are_learned_and_shown_alike(
    policy: LoadedPolicy, thinking: str, tmp_path: Path
) -> None:
    steps: list[dict[str, Any]] = [
        {"image": "0.png", "action": {"kind": "click", "x": 5, "y": 6}, "thought": "Left </think>."},
        {"image": "1.png", "action": {"kind": "wait"}},
    ]  # fmt: skip
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(screenshot(number))
    (tmp_path / EPISODES).write_text(json.dumps({"instruction": "do it", "steps": steps}) + "\n")
    examples = ActionExamples(policy, Config(policy=CONFIG), read_episodes(tmp_path))
    first, second = examples.of(0), examples.of(1)
    so_far = [*first.prompt.token_ids, *first.answer]
    assert second.prompt.token_ids[: len(so_far)] == so_far
    learned = policy.decode(first.answer)
    if thinking in OPEN:
        tag = "thinking" if thinking == "begins in another tag" else "think"
        assert learned.startswith(f"Left /think>.\n</{tag}>\n\n<tool_call>")
        assert policy.decode(second.answer).startswith(f"\n</{tag}>\n\n<tool_call>")
    else:
        assert learned.startswith("Action: Left /think>.\n<tool_call>")


def test_a_solution_that_no_policy_sampled_ends_the_thought_first(
    policy: LoadedPolicy, thinking: str
) -> None:
    renderer = make_renderer(policy, CONFIG)
    request = ActRequest(
        trajectory_id="t",
        step=0,
        instruction="do it",
        turns=[],
        screenshot=screenshot(0),
        width=168,
        height=168,
        sampling=Sampling(temperature=1.0, max_tokens=9, seed=0),
    )
    encoder = PolicyPromptEncoder(policy, renderer)
    text = encoder.closed_thought("Why?") + "wait()"
    sampled = encoder.encode_completion(text, request)
    assert policy.decode(sampled.token_ids) == renderer.closed_thought("Why?") + "wait()"
    assert bool(renderer.closed_thought()) == (thinking in OPEN)


def test_a_grounding_answer_ends_the_thought_and_is_a_pixel_of_its_region(
    policy: LoadedPolicy, thinking: str
) -> None:
    config = Config(policy=CONFIG)
    answers = TextAnswers(policy, config, format_of("point", ""))
    corner = Polygon(((0, 0), (90, 0), (90, 4), (4, 4), (4, 90), (0, 90)))  # around its middle
    for region, pixel in ((corner, (4, 45)), (Box(10.6, 4, 11.2, 5), (11, 4))):
        item = Item("a", Picture(Path("a.png")), (168, 168), "it", region)
        text = answers.text(item)
        ended = make_renderer(policy, CONFIG).closed_thought()
        assert text.startswith(ended)
        assert bool(ended) == (thinking in OPEN)
        assert read_point(text, answers.map_of(item)).point == pixel
        assert policy.decode(answers.of(item)[0]) == text


def test_a_text_without_a_thought_stands_as_the_template_shows_it(policy: LoadedPolicy) -> None:
    """What an action parser shortened, or an agent that keeps no thoughts: no thought is left open before it."""
    before = policy.tokenizer.chat_template
    shown = {}
    try:
        for name in sorted(OPEN):
            policy.tokenizer.chat_template = TEMPLATES[name]
            turns = past_of(["wait()"], [[]])
            prompt = make_renderer(policy, CONFIG).render("do it", turns, screenshot(1))
            text = policy.tokenizer.decode(prompt.token_ids)
            shown[name] = text.split("assistant\n")[1].partition("<|im_end|>")[0]
    finally:
        policy.tokenizer.chat_template = before
    assert shown == {
        "takes past thoughts out": "wait()",
        "keeps past thoughts": "<think>\n\n</think>\n\nwait()",
        "shows empty thoughts": "<think>\n\n</think>\n\nwait()",
        "keeps thoughts behind the last question": "wait()",
        "begins in another tag": "wait()",
        "has Qwen3.5's rules": "wait()",
        "has Qwen3.8's rules": "<think>\n\n</think>\n\nwait()",
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            template(PLAIN + "{{- TEXT }}", THINKING).replace("+ m.role", "+ ('' if loop.last else 'past ') + m.role"),
            "the chat template shows a past message differently from the newest",
        ),
        (template(PLAIN, THINKING), "the prompt shows 0 of 2 past completions; .*"),
        (
            template("{{- '<|im_start|>assistant' + ('\n' if loop.index0 == 1 else ':\n') + TEXT }}", THINKING),
            "begins past replies in several ways",
        ),
    ],
)  # fmt: skip
def test_a_template_that_cannot_show_past_turns_is_refused_where_they_are_shown(
    policy: LoadedPolicy, text: str, problem: str
) -> None:
    before = policy.tokenizer.chat_template
    policy.tokenizer.chat_template = text
    try:
        with pytest.raises(
            ModelError, match=rf"{problem}; fix .* policy\.history_turns to 0"
        ) as error:
            make_renderer(policy, CONFIG)
        assert "\n" not in str(error.value)
        alone = make_renderer(policy, CONFIG.model_copy(update={"history_turns": 0}))
        assert alone.render("do it", [], screenshot(0)).token_ids
        with pytest.raises(PromptError):
            alone.render("do it", past_of(["a", "b"], [[], []]), screenshot(2))
    finally:
        policy.tokenizer.chat_template = before
