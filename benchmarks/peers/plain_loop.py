"""A plain GRPO loop in one process, which plays all episodes and then learns: a baseline of peers.py.

    python benchmarks/peers/plain_loop.py CONFIG [--seed 0] [--minutes 5] [--threads 2] [--set KEY=VALUE]

It does the same task: dart's environments, prompts, action language and model folder. All else is transformers and
torch alone: `generate` over all episodes that play, one padded forward pass over their steps, AdamW. The rate is the
configuration's. Each update prints a line of JSON: trajectories so far, and the success of this batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dart_cli.config.load import load_config  # noqa: E402 - after the path
from dart_cli.config.schema import Config  # noqa: E402 - likewise
from dart_cli.config.task_split import trained_tasks  # noqa: E402 - likewise
from dart_cli.data.scheduler import task_seed  # noqa: E402 - likewise
from dart_cli.env.step_prompts import action_spec_of  # noqa: E402 - likewise
from dart_cli.policy.loader import load_policy  # noqa: E402 - likewise
from dart_cli.policy.prompt import RenderedPrompt, make_renderer  # noqa: E402 - likewise
from envs.contract.actions import Answer, Done, Fail  # noqa: E402 - likewise
from envs.contract.base import GuiEnv, Observation, Task  # noqa: E402 - likewise
from envs.contract.registry import make_env  # noqa: E402 - likewise

ROWS = 64
"""Steps of one forward pass."""


@dataclass
class Episode:
    """One trajectory."""

    env: GuiEnv
    task: Task
    screen: Observation
    instruction: str
    steps: list[tuple[RenderedPrompt, list[int]]] = field(default_factory=list)
    reward: float = 0.0
    is_over: bool = False


class PlainLoop:
    """A model, its optimizer, and as many environments as an update has trajectories."""

    def __init__(self, config: Config, seed: int) -> None:
        torch.manual_seed(seed)
        self._config = config
        self._seed = seed
        self._policy = load_policy(config.model.path, weights=False)  # for prompts and pixels alone
        self._model: Any = AutoModelForImageTextToText.from_pretrained(
            self._policy.folder, dtype=getattr(torch, config.model.dtype)
        )
        self._model.model.visual.requires_grad_(not config.model.freeze_vision)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=config.train.rate, weight_decay=0.0)
        self.trained = trained
        self._renderer = make_renderer(self._policy, config.policy)
        self._actions = action_spec_of(config)
        self._tasks = trained_tasks(config)
        self._groups = config.data.groups_per_batch
        self._size = config.data.group_size
        self._envs = [make_env(config.env.suite) for _ in range(self._groups * self._size)]
        self._numbers = count()

    def update(self) -> list[float]:
        """Play a batch and learn from it; return the rewards of its trajectories."""
        episodes = self._begin_episodes()
        while playing := [episode for episode in episodes if not episode.is_over]:
            prompts = [
                self._renderer.render(episode.instruction, [], episode.screen.screenshot)
                for episode in playing
            ]
            for each, prompt, tokens in zip(playing, prompts, self._sampled(prompts), strict=True):
                each.steps.append((prompt, tokens))
                self._act(each, self._policy.decode(tokens))
        self._learn(episodes)
        return [episode.reward for episode in episodes]

    def _begin_episodes(self) -> list[Episode]:
        episodes = []
        for begin in range(0, len(self._envs), self._size):
            number = next(self._numbers)
            task = self._tasks[number % len(self._tasks)]
            seed = task_seed(self._seed, number)
            for env in self._envs[begin : begin + self._size]:
                screen, info = env.reset(seed=seed, options={"task": task})
                episodes.append(Episode(env, task, screen, str(info["instruction"])))
        return episodes

    def _act(self, episode: Episode, text: str) -> None:
        actions, _ = self._actions.read(text, episode.screen, None)
        if not actions:
            episode.is_over = True  # malformed: a failure
            return
        for action in actions:
            episode.screen, _, terminated, truncated, _ = episode.env.step(action)
            ends = isinstance(action, Done | Answer | Fail) or terminated or truncated
            if ends or (len(episode.steps) == episode.task.max_steps and action is actions[-1]):
                episode.is_over = True
                episode.reward = episode.env.evaluate().reward or 0.0
                return

    def _arguments(self, sequences: list[list[int]], images: list[list[bytes]]) -> dict[str, Any]:
        inputs = self._policy.inputs(sequences, images)
        ordered = [inputs.images[index] for index in inputs.image_order]
        return {
            "input_ids": inputs.input_ids,
            "attention_mask": inputs.attention_mask,
            "mm_token_type_ids": (inputs.input_ids == self._policy.image_token_id).int(),
            "pixel_values": torch.cat([image.patches for image in ordered]),
            "image_grid_thw": torch.tensor([image.grid for image in ordered]),
        }

    @torch.no_grad()
    def _sampled(self, prompts: list[RenderedPrompt]) -> list[list[int]]:
        """Return a completion [A] of each prompt, its end token included."""
        arguments = self._arguments(
            [prompt.token_ids for prompt in prompts], [prompt.images for prompt in prompts]
        )
        ends = self._policy.end_token_ids
        generated = self._model.generate(
            **arguments,
            do_sample=True,
            temperature=self._config.rollout.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self._config.rollout.max_tokens,
            eos_token_id=list(ends),
            pad_token_id=self._policy.pad_token_id,
        )
        samples = []
        for row in generated[:, arguments["input_ids"].shape[1] :].tolist():
            end = next((at for at, token in enumerate(row) if token in ends), len(row) - 1)
            samples.append(row[: end + 1])
        return samples

    def _learn(self, episodes: list[Episode]) -> None:
        """Make one update with AdamW: advantages by group, all tokens alike (GRPO, arXiv 2402.03300, equation 3)."""
        rewards = torch.tensor([episode.reward for episode in episodes]).view(-1, self._size)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten().tolist()
        work = [
            (prompt, tokens, advantage)
            for episode, advantage in zip(episodes, advantages, strict=True)
            for prompt, tokens in episode.steps
            if advantage
        ]
        if not work:
            return
        total = sum(len(tokens) for _, tokens, _ in work)
        self._optimizer.zero_grad()
        for begin in range(0, len(work), ROWS):
            part = work[begin : begin + ROWS]
            sequences = [prompt.token_ids + tokens for prompt, tokens, _ in part]
            arguments = self._arguments(sequences, [prompt.images for prompt, _, _ in part])
            longest = max(len(tokens) for _, tokens, _ in part)
            # Sequences end together, but their completions do not begin so: padding is on the left.
            logits = self._model(**arguments, logits_to_keep=longest + 1).logits[:, :-1]
            targets = arguments["input_ids"][:, -longest:]
            logits = logits / self._config.rollout.temperature
            logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            weights = torch.zeros_like(logprobs)
            for row, (_, tokens, advantage) in enumerate(part):
                weights[row, -len(tokens) :] = advantage / total
            (-(logprobs * weights).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, self._config.train.grad_clip)
        self._optimizer.step()


def options_of(doc: str) -> argparse.Namespace:
    """Read the options of a peer and set the threads of torch; `doc` is the docstring of its module."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def main() -> None:
    """Train for `--minutes`; print a line of JSON for each update."""
    options = options_of(__doc__ or "")
    loop = PlainLoop(load_config(options.config, options.sets), options.seed)
    end, episodes = time.monotonic() + 60 * options.minutes, 0
    print(json.dumps({"trajectories": 0}), flush=True)
    while time.monotonic() < end:
        rewards = loop.update()
        episodes += len(rewards)
        line = {
            "trajectories": episodes,
            "success": sum(reward == 1.0 for reward in rewards) / len(rewards),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
