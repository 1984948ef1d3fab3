"""A small policy with real structure and spread-out distributions, and prompts to ask it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from PIL import Image

from bus.messages import Sampling, Turn
from dart_cli.engines.base import GenerateRequest
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from scripts import tiny_model as tiny

Asker = Callable[..., GenerateRequest]


@pytest.fixture(scope="session")
def untrained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model with random weights: no token is certain, every number is tested."""
    folder = tmp_path_factory.mktemp("policy") / "untrained"
    tiny.save(folder, *tiny.build_tiny(seed=3), build={})
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def policy(untrained_folder: Path) -> LoadedPolicy:
    return load_policy(untrained_folder)


def screenshot(seed: int, width: int = 168, height: int = 168) -> bytes:
    """Large random blocks, different for each seed, in each of the encodings that a run may store."""
    rng = Random(seed)
    blocks = Image.new("RGB", (6, 6))
    blocks.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range(36)])
    buffer = io.BytesIO()
    blocks.resize((width, height), Image.Resampling.NEAREST).save(
        buffer, ("PNG", "WEBP", "JPEG")[seed % 3]
    )
    return buffer.getvalue()


def random_turns(rng: Random, visible_images: int) -> list[Turn]:
    """Past turns, the last `visible_images` of which still show their screen."""
    count = rng.randint(visible_images, visible_images + 3)
    return [
        Turn(
            text=f"click({rng.randrange(1000)},{rng.randrange(1000)})",
            screenshot=screenshot(rng.randrange(10**6)) if count - i <= visible_images else None,
        )
        for i in range(count)
    ]


@pytest.fixture
def ask(policy: LoadedPolicy) -> Asker:
    return asker(policy)


def asker(policy: LoadedPolicy) -> Asker:
    """A function that returns a request; the same seed gives the same one."""
    renderer = PromptRenderer(policy)

    def make(
        seed: int,
        *,
        temperature: float = 1.0,
        max_tokens: int = 10,
        past_images: int = 0,
        sampling_seed: int | None = None,
    ) -> GenerateRequest:
        rng = Random(seed)
        colour = rng.choice(["red", "green", "unheard-of"])
        prompt = renderer.render(
            f"click the {colour} button",
            random_turns(rng, past_images) if past_images or rng.random() < 0.3 else [],
            screenshot(seed, rng.choice([168, 168, 196]), 168),
        )
        return GenerateRequest(
            request_id=f"request-{seed}",
            prompt_token_ids=prompt.token_ids,
            images=prompt.images,
            sampling=Sampling(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=seed if sampling_seed is None else sampling_seed,
            ),
        )

    return make
