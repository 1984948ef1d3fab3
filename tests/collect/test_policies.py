"""The oracle's and the hinted policy's tokens are those that their stored prompts and numbers claim."""

from __future__ import annotations

import pytest
import torch

from bus.messages import ActRequest, Completion, Sampling
from dart_cli.collect import CollectOptions
from dart_cli.collect.collector import HintedPolicy, collected_tasks, play_quotas
from dart_cli.collect.quotas import Quota
from dart_cli.config.schema import Config
from dart_cli.data.exchange.parquet_schema import Trajectory
from dart_cli.engines.base import PromptEncoder, Responder
from dart_cli.env.step_prompts import action_spec_of
from dart_cli.policy.forward import image_features, logits, masked_logprobs
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from dart_cli.rollout.worker import load_model, load_prompt_encoder
from envs.contract.registry import make_env


def test_a_prompt_encoder_without_weights_writes_what_the_whole_policy_writes(
    config: Config, policy: LoadedPolicy
) -> None:
    light = load_policy("builtin:tiny", weights=False)
    for name in ("image_token_id", "pad_token_id", "end_token_ids", "forbidden_token_ids"):
        assert getattr(light, name) == getattr(policy, name)
    assert light.max_positions == policy.max_positions
    request = ActRequest(
        trajectory_id="t",
        step=0,
        instruction="",
        turns=[],
        screenshot=b"",
        width=168,
        height=168,
        sampling=Sampling(temperature=1.0, max_tokens=8, seed=0),
    )
    written = load_prompt_encoder(config).encode_completion("click(1,999)", request)
    assert written.token_ids == policy.encode_completion("click(1,999)")
    assert not written.patches


class RecordingResponder:
    """Answers through another responder, and records requests and completions."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self.recorded: list[tuple[ActRequest, Completion]] = []

    @property
    def prompt_encoder(self) -> PromptEncoder:
        return self._responder.prompt_encoder

    async def preload_images(self, request: ActRequest) -> object:
        return await self._responder.preload_images(request)

    async def answer(self, request: ActRequest) -> Completion:
        completion = await self._responder.answer(request)
        self.recorded.append((request, completion))
        return completion


async def test_a_hint_is_sampled_under_and_stored_without(
    config: Config, policy: LoadedPolicy
) -> None:
    """Stored: the plain prompt, and the log-probabilities of the tokens under the hinted one."""
    config = config.model_copy(update={"policy": Config().policy})
    model = load_model(config)
    responder = RecordingResponder(model.responder)
    action_spec = action_spec_of(config)
    wanted = CollectOptions(per_task=1, tasks=("mini/popup",), player="policy", hints=True)
    quotas = [Quota(task, wanted, 5) for task in collected_tasks(config, wanted)]
    kept: list[Trajectory] = []
    await play_quotas(
        config,
        quotas,
        lambda env, _: HintedPolicy(responder, env, action_spec),
        wanted.source,
        kept.append,
    )
    await model.engine.close()
    [found] = kept
    assert found.source == "demonstration"
    assert found.has_logprobs
    renderer = PromptRenderer(policy)
    recorded = responder.recorded[-len(found.steps) :]
    _, info = make_env("mini").reset(seed=found.task_seed, options={"task": found.task_id})
    task_says = info["instruction"]
    assert (
        recorded[0][0].instruction != task_says
    )  # the pop-up first; what the task says after that
    for step, (asked, said) in zip(found.steps, recorded, strict=True):
        hinted = renderer.render(asked.instruction, asked.turns, asked.screenshot)
        assert list(said.prompt_token_ids) == hinted.token_ids
        assert (hinted.token_ids == step.prompt_token_ids) == (asked.instruction == task_says)
        assert step.sampled.token_ids == said.sampled.token_ids
        assert step.sampled.behaviour_logprobs == said.sampled.behaviour_logprobs
        images = [found.images[name] for name in step.image_hashes]
        under_hint = _logprobs(policy, hinted.token_ids, step.sampled.token_ids, images)
        assert step.sampled.behaviour_logprobs == pytest.approx(under_hint, abs=1e-4)
    first = found.steps[0]
    shown = [found.images[name] for name in first.image_hashes]
    plain = _logprobs(policy, first.prompt_token_ids, first.sampled.token_ids, shown)
    assert list(first.sampled.behaviour_logprobs) != pytest.approx(plain, abs=1e-2)


def _logprobs(
    policy: LoadedPolicy, prompt: list[int], completion: list[int], images: list[bytes]
) -> list[float]:
    """Of each token of a completion, by one whole forward pass, nats."""
    inputs = policy.inputs([[*prompt, *completion]], [images])
    with torch.no_grad():
        features = image_features(policy.model, inputs.images)
        values = logits(policy.model, inputs, last=len(completion) + 1, features=features)
    logprobs = masked_logprobs(values[0, :-1], policy.forbidden(torch.device("cpu")), 1.0)
    return [float(row[token]) for row, token in zip(logprobs, completion, strict=True)]


def test_every_hint_of_suite_mini_is_an_instruction_that_its_base_model_knows() -> None:
    from scripts.grounding_screens import INSTRUCTIONS

    env = make_env("mini")
    for task in ("popup", "menu", "page", "confirm", "tabs", "folder", "scroll", "form", "delete"):
        _, info = env.reset(seed=3, options={"task": f"mini/{task}"})
        for _ in range(info["need"]):
            assert env.oracle_hint() in INSTRUCTIONS  # type: ignore[attr-defined]
            env.step(env.oracle_action())  # type: ignore[attr-defined]
