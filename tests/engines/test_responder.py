"""Promises of what stands between a screen and an engine."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from bus.messages import ActRequest, Sampling
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.scripted import Script, ScriptedEngine
from dart_cli.policy.loader import LoadedPolicy


def screen(width: int, height: int) -> ActRequest:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return ActRequest(
        trajectory_id="t",
        step=0,
        instruction="click the red button",
        turns=[],
        screenshot=buffer.getvalue(),
        width=width,
        height=height,
        sampling=Sampling(temperature=1.0, max_tokens=8, seed=0),
    )


async def test_a_completion_is_the_text_without_its_end(policy: LoadedPolicy) -> None:
    tokens = policy.tokenizer.encode("click(1,2)<|im_end|>", add_special_tokens=False)
    responder = PolicyResponder(policy, ScriptedEngine(lambda _: Script(tokens)))
    completion = await responder.answer(screen(168, 168))
    assert (completion.text, completion.sampled.token_ids) == ("click(1,2)", tokens)
    assert completion.prompt_token_ids.count(policy.image_token_id) == 36


async def test_the_text_of_a_screen_is_in_the_prompt(policy: LoadedPolicy) -> None:
    responder = PolicyResponder(policy, ScriptedEngine(lambda _: Script([policy.end_token_ids[0]])))
    asked = screen(168, 168).model_copy(update={"observed_text": "Terminal:\n$ ls"})
    prompt = policy.tokenizer.decode((await responder.answer(asked)).prompt_token_ids)
    assert "<|vision_end|>\nTerminal:\n$ ls\nclick the red button<|im_end|>" in prompt


async def test_the_reply_to_a_request_with_a_hint_says_what_another_prompt_would_have(
    policy: LoadedPolicy,
) -> None:
    """The policy reads the instruction alone; the prompt with the hint is that of the other instruction."""
    requests: list[GenerateRequest] = []

    def answer(request: GenerateRequest) -> Script:
        requests.append(request)
        return Script([policy.end_token_ids[0]])

    responder = PolicyResponder(policy, ScriptedEngine(answer))
    plain = await responder.answer(screen(168, 168))
    assert plain.hint is None
    asked = screen(168, 168).model_copy(update={"hinted_instruction": "pick <|im_end|> blue"})
    reply = await responder.answer(asked)
    assert reply.prompt_token_ids == plain.prompt_token_ids
    assert [each.prompt_token_ids for each in requests] == [list(plain.prompt_token_ids)] * 2
    hint, prompt = reply.hint, list(reply.prompt_token_ids)
    assert hint is not None
    hinted = asked.model_copy(update={"instruction": asked.hinted_instruction})
    assert prompt[: hint.start] + list(hint.token_ids) + prompt[hint.end :] == (
        responder.prompt_encoder.encode_prompt(hinted)
    )
    assert policy.image_token_id not in prompt[hint.start : hint.end]
    same = screen(168, 168).model_copy(update={"hinted_instruction": asked.instruction})
    empty = (await responder.answer(same)).hint
    assert empty is not None
    assert (empty.end - empty.start, len(empty.token_ids)) == (0, 0)


async def test_screens_that_were_looked_at_are_not_read_again(
    policy: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    responder = PolicyResponder(policy, ScriptedEngine(lambda _: Script([policy.end_token_ids[0]])))
    monkeypatch.setattr(policy.images, "cache_bytes", 1)
    asked = [screen(168, 182 + 14 * each) for each in range(3)]
    looked_at = [await responder.preload_images(request) for request in asked]

    def never(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(policy.images, "_prepare", never)
    for request, images in zip(asked, looked_at, strict=True):
        completion = await responder.answer(request)
        assert completion.prompt_token_ids.count(policy.image_token_id) == images[0].tokens
        assert policy.images.prepare(request.screenshot) is images[0]
