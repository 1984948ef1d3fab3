from __future__ import annotations

import io

import pytest
from PIL import Image

from bus.errors import EngineError
from bus.messages import Turn
from dart_cli.policy import tiny
from dart_cli.policy.model import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer, RenderedPrompt


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.save(folder, *tiny.build_tiny(seed=0), build={})
    return load_policy(folder)


def screenshot(shade: int, width: int = 168, height: int = 168) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (shade, shade, shade)).save(buffer, "PNG")
    return buffer.getvalue()


def shown(policy: LoadedPolicy, prompt: RenderedPrompt) -> str:
    """The prompt's text with each image as <36>: its number of placeholders."""
    text = policy.tokenizer.decode(prompt.token_ids)
    parts = text.split("<|vision_start|>")
    rest = [part.split("<|vision_end|>") for part in parts[1:]]
    return parts[0] + "".join(f"<{len(i) // len('<|image_pad|>')}>{after}" for i, after in rest)


def test_a_first_screen_is_image_then_instruction(policy: LoadedPolicy) -> None:
    prompt = PromptRenderer(policy).render("click the red button", [], screenshot(1))
    assert shown(policy, prompt) == (
        "<|im_start|>user\n<36>click the red button<|im_end|><|im_start|>assistant\n"
    )
    assert prompt.images == [screenshot(1)]


def test_past_turns_keep_their_order_and_the_images_that_history_left(policy: LoadedPolicy) -> None:
    turns = [
        Turn(text="click(1,2)"),
        Turn(text="wait()", screenshot=screenshot(2, 224, 168)),
        Turn(text="done()", screenshot=screenshot(3)),
    ]
    prompt = PromptRenderer(policy).render("pick red", turns, screenshot(4))
    assert shown(policy, prompt) == (
        "<|im_start|>user\npick red<|im_end|><|im_start|>assistant\nclick(1,2)<|im_end|>"
        "<|im_start|>user\n<48><|im_end|><|im_start|>assistant\nwait()<|im_end|>"
        "<|im_start|>user\n<36><|im_end|><|im_start|>assistant\ndone()<|im_end|>"
        "<|im_start|>user\n<36><|im_end|><|im_start|>assistant\n"
    )
    assert prompt.images == [screenshot(2, 224, 168), screenshot(3), screenshot(4)]


def test_a_first_turn_with_its_image_shows_it_before_the_instruction(policy: LoadedPolicy) -> None:
    turns = [Turn(text="wait()", screenshot=screenshot(2))]
    prompt = PromptRenderer(policy).render("pick red", turns, screenshot(4))
    assert shown(policy, prompt).startswith("<|im_start|>user\n<36>pick red<|im_end|>")


def test_system_message_and_template_wrap_the_instruction(policy: LoadedPolicy) -> None:
    renderer = PromptRenderer(policy, system="be brief", template="# Task\n{instruction}\n")
    prompt = renderer.render("use {braces}", [], screenshot(1))
    assert shown(policy, prompt) == (
        "<|im_start|>system\nbe brief<|im_end|><|im_start|>user\n<36># Task\nuse {braces}\n"
        "<|im_end|><|im_start|>assistant\n"
    )


def test_rendering_twice_gives_the_same_tokens(policy: LoadedPolicy) -> None:
    renderer = PromptRenderer(policy)
    turns = [Turn(text="wait()", screenshot=screenshot(2))]
    first = renderer.render("pick red", turns, screenshot(4))
    assert renderer.render("pick red", turns, screenshot(4)) == first
    bigger = renderer.render("pick red", turns, screenshot(4, 224, 224))
    assert len(bigger.token_ids) == len(first.token_ids) + 64 - 36


def test_a_spelt_out_placeholder_cannot_shift_the_images(policy: LoadedPolicy) -> None:
    renderer = PromptRenderer(policy)
    with pytest.raises(EngineError, match="image placeholders"):
        renderer.render("click <|image_pad|>", [], screenshot(1))
    with pytest.raises(EngineError, match="image placeholders"):
        renderer.render("pick red", [Turn(text="<|image_pad|>")], screenshot(1))


def test_a_folder_whose_template_drops_images_is_named(policy: LoadedPolicy) -> None:
    template = policy.tokenizer.chat_template
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    try:
        with pytest.raises(EngineError, match="chat template"):
            PromptRenderer(policy).render("pick red", [], screenshot(1))
    finally:
        policy.tokenizer.chat_template = template
