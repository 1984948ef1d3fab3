"""A random tiny model, and trajectories that it plays in the embedded environment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.errors import ActionError
from bus.messages import ActRequest, Batch, Sampling, Turn
from bus.packed import float64s, int32s
from dart_cli.config.schema import Config, ModelConfig, RunConfig, TrainConfig
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.history import History
from dart_cli.language.parsers import make_action_parser
from dart_cli.policy.loader import load_policy
from dart_cli.weights.file import load
from envs.contract.actions import Click
from envs.contract.blobs import content_hash
from envs.contract.registry import load_suite, make_env
from scripts.tiny_model import build_tiny, save

SUITE = "mini"
HISTORY = History(images=3, turns=4)

Play = Callable[..., Batch]


@pytest.fixture
def float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute norms and rotations in float64, which transformers would round to float32."""
    to, single = torch.Tensor.to, torch.Tensor.float

    def wide_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_narrowed = self.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values())
        return self if is_narrowed else to(self, *args, **kwargs)

    def wide_float(self: torch.Tensor) -> torch.Tensor:
        return self if self.dtype == torch.float64 else single(self)

    monkeypatch.setattr(torch.Tensor, "to", wide_to)
    monkeypatch.setattr(torch.Tensor, "float", wide_float)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained tiny model as a Hugging Face folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    save(folder, *build_tiny(seed=0), build={})
    return folder


@pytest.fixture(scope="session")
def make_config() -> Callable[[Path], Config]:
    """Return make_config(folder) -> the configuration of a short training of that model."""
    return lambda folder: Config(
        model=ModelConfig(path=str(folder)),
        train=TrainConfig(
            lr=1e-3, updates=4, pack_tokens=512, checkpoint_every=1, weight_decay=0.01
        ),
    )


@pytest.fixture
def config(tmp_path: Path, tiny_folder: Path, make_config: Callable[[Path], Config]) -> Config:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    return make_config(tiny_folder).model_copy(update={"run": RunConfig(dir=run_dir)})


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    """An engine with a model of its own, at version 0."""
    engine = TransformersEngine(load_policy(tiny_folder), load_weights=load, max_batch=32)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="session")
def batches(tiny_folder: Path) -> list[Batch]:
    """Return four batches that the untrained model played, with ids 1 to 4."""
    engine = TransformersEngine(load_policy(tiny_folder), max_batch=32)
    play_group = [_play(engine, 5, 2, batch_id=number) for number in (1, 2, 3, 4)]
    asyncio.run(engine.close())
    return play_group


@pytest.fixture(scope="session")
def play() -> Play:
    """Return play(engine, trajectories, steps, temperature, batch_id) -> a batch with random rewards."""
    return _play


def _play(
    engine: TransformersEngine,
    trajectories: int,
    steps: int,
    temperature: float = 1.0,
    batch_id: int = 1,
) -> Batch:
    """Play multi-turn trajectories in the real environment; a malformed completion clicks the middle."""
    images: dict[str, bytes] = {}

    async def all_of_them() -> list[list[BatchStep]]:
        return await asyncio.gather(*(one(number) for number in range(trajectories)))

    async def one(number: int) -> list[BatchStep]:
        tasks = list(load_suite(SUITE).tasks.values())
        task = tasks[number % len(tasks)]
        env = make_env(SUITE)
        responder = PolicyResponder(engine.policy, engine)
        observation, info = env.reset(seed=number // 2, options={"task": task})
        advantage = random.Random(number).uniform(-1.5, 1.5)
        turns: list[Turn] = []
        steps_made: list[BatchStep] = []
        for step in range(steps):
            visible = HISTORY.visible(turns)
            completion = await responder.answer(
                ActRequest(
                    trajectory_id=f"t{number}",
                    step=step,
                    instruction=str(info.get("instruction", task.instruction)),
                    turns=visible,
                    screenshot=observation.screenshot,
                    width=observation.width,
                    height=observation.height,
                    sampling=Sampling(
                        temperature=temperature,
                        max_tokens=4 + number % 5,
                        seed=1000 * batch_id + 100 * number + step,
                    ),
                )
            )
            visible_screens = [turn.screenshot for turn in visible if turn.screenshot is not None]
            visible_screens.append(observation.screenshot)
            images.update({content_hash(blob): blob for blob in visible_screens})
            steps_made.append(
                BatchStep(
                    group_id="g0",
                    trajectory_id=f"t{number}",
                    step=step,
                    prompt_token_ids=int32s(completion.prompt_token_ids),
                    token_ids=int32s(completion.sampled.token_ids),
                    behaviour_logprobs=float64s(completion.sampled.behaviour_logprobs),
                    version_spans=completion.sampled.version_spans,
                    image_hashes=[content_hash(blob) for blob in visible_screens],
                    advantage=advantage,
                    weight=1.0,
                    routing=completion.sampled.routing,
                )
            )
            frame = make_coordinate_map("thousandths", observation.width, observation.height)
            try:
                action = make_action_parser("compact").parse(completion.text, frame)
            except ActionError:
                action = Click(x=observation.width // 2, y=observation.height // 2)
            turns.append(Turn(text=completion.text, screenshot=observation.screenshot))
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                observation, info = env.reset(seed=number, options={"task": task})
        env.close()
        return steps_made

    chains, samples = chained([s for trajectory in asyncio.run(all_of_them()) for s in trajectory])
    return Batch(
        batch_id=batch_id,
        group_ids=["g0"],
        temperature=temperature,
        chains=chains,
        samples=samples,
        images=images,
    )
