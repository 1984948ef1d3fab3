"""A prompt as the messages of a chat gives the tokens that the prompt itself has."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages import ActRequest, ChatMessage, ChatPart, Sampling, Turn
from dart_cli.config.families import FAMILIES, values_of
from dart_cli.config.schema import PolicyConfig
from dart_cli.language.vocabulary import CUT, SLOT, STRUCTURAL
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import make_renderer
from scripts.small_models import build
from tests.policy.test_prompt import screenshot

PIECES = st.sampled_from(["a", " ", "\n", "{instruction}", *STRUCTURAL])
TEXTS = st.lists(PIECES, max_size=5).map("".join)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    folder: Path = build("qwen3_vl", tmp_path_factory.mktemp("models") / "qwen3_vl")
    return load_policy(folder, weights=False)


@pytest.mark.parametrize(
    "family", ["ui-tars", "qwen3-vl", "qwen3-vl-mobile", "mai-ui", "opencua-qwen2"]
)
@given(
    instruction=TEXTS,
    previous=TEXTS,
    beside=TEXTS,
    past=st.lists(st.tuples(st.booleans(), TEXTS, TEXTS), max_size=3),
)
@settings(max_examples=12, deadline=None)
def test_its_messages_give_the_tokens_of_the_prompt(
    family: str,
    instruction: str,
    previous: str,
    beside: str,
    past: list[tuple[bool, str, str]],
    policy: LoadedPolicy,
) -> None:
    assert family in FAMILIES
    config = PolicyConfig(**{key: value for key, (value, _) in values_of(family).items()})
    renderer = make_renderer(policy, config)
    turns = [
        Turn(text=text, screenshot=screenshot(n) if has_image else None, observed_text=observed)
        for n, (has_image, text, observed) in enumerate(past, start=1)
    ]
    request = ActRequest(
        trajectory_id="t",
        step=0,
        instruction=instruction,
        turns=turns,
        previous=previous,
        screenshot=screenshot(0),
        width=168,
        height=168,
        observed_text=beside,
        sampling=Sampling(temperature=1.0, max_tokens=9, seed=0),
    )
    chat = renderer.chat(request)
    assert not any(
        mark in part
        for _, parts in chat
        for part in parts
        if isinstance(part, str)
        for mark in (CUT, SLOT)
    )
    messages = [
        ChatMessage(
            role=role,
            parts=[
                ChatPart(text=part) if isinstance(part, str) else ChatPart(is_image=True)
                for part in parts
            ],
        )
        for role, parts in chat
    ]
    images = [part for _, parts in chat for part in parts if isinstance(part, bytes)]
    again = renderer.render_messages(messages, images)
    whole = renderer.render(
        instruction, turns, request.screenshot, (), request.observed_text, previous
    )
    assert again.images == whole.images
    assert policy.decode(again.token_ids) == policy.decode(whole.token_ids)
