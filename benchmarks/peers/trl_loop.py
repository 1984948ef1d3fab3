"""TRL's GRPOTrainer on a task of one step: run by peers.py with the interpreter of scripts/setup-peers.

    .venv-peers/bin/python benchmarks/peers/trl_loop.py CONFIG [--seed 0] [--minutes 5] [--threads 2] [--set KEY=VALUE]

The same model folder, tasks, rate, groups and temperature as dart has from CONFIG. Each batch of rewards prints a line
of JSON: trajectories so far, and their success.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars  # type: ignore[import-not-found, unused-ignore]
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.plain_loop import options_of  # noqa: E402 - after the path
from dart_cli.config.load import load_config  # noqa: E402 - likewise
from dart_cli.config.model_folder import resolve  # noqa: E402 - likewise
from dart_cli.config.schema import Config  # noqa: E402 - likewise
from dart_cli.config.task_split import trained_tasks  # noqa: E402 - likewise
from dart_cli.data.scheduler import task_seed  # noqa: E402 - likewise
from dart_cli.env.step_prompts import action_spec_of  # noqa: E402 - likewise
from envs.contract.registry import make_env  # noqa: E402 - likewise

INSTANCES = 1000
"""Of the data set, which TRL wants whole before it begins."""


class ScreenProcessor(Qwen3VLProcessor):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """A processor without videos, for which torchvision would be needed."""

    attributes = ("image_processor", "tokenizer")

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=tokenizer.chat_template)


class OneStep:
    """The instances of the configuration's tasks, and what a completion earns there."""

    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._env = make_env(config.env.suite)
        self._tasks = trained_tasks(config)
        self._actions = action_spec_of(config)
        self._episodes = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Return the screen, instruction and number of each instance."""
        for number in range(INSTANCES):
            screen, instruction = self._begin_episode(number)
            message: dict[str, Any] = {"role": "user", "content": instruction}
            yield {
                "prompt": [message],
                "image": Image.open(io.BytesIO(screen.screenshot)).convert("RGB"),
                "number": number,
            }

    def _begin_episode(self, number: int) -> tuple[Any, str]:
        task = self._tasks[number % len(self._tasks)]
        seed = task_seed(self._seed, number)
        screen, info = self._env.reset(seed=seed, options={"task": task})
        return screen, str(info["instruction"])

    def reward(self, completions: list[Any], number: list[int], **_columns: Any) -> list[float]:
        """Return the verdicts on completions, as TRL asks for them."""
        rewards = []
        for completion, each in zip(completions, number, strict=True):
            screen, _ = self._begin_episode(each)
            actions, _ = self._actions.read(completion[0]["content"], screen, None)
            for action in actions:
                self._env.step(action)
            passed = bool(actions) and self._env.evaluate().outcome == "pass"
            rewards.append(float(passed))
        self._episodes += len(rewards)
        line = {"trajectories": self._episodes, "success": sum(rewards) / len(rewards)}
        print(json.dumps(line), flush=True)
        return rewards


class Until(TrainerCallback):  # type: ignore[misc]
    """A callback that ends the training after so many minutes."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Stop the training after an update if the time is up."""
        control.should_training_stop |= time.monotonic() > self._end


def main() -> None:
    """Train for `--minutes`."""
    options = options_of(__doc__ or "")
    disable_progress_bars()
    config = load_config(options.config, options.sets)
    folder = resolve(config.model.path)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.model.visual.requires_grad_(not config.model.freeze_vision)
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    tasks, data, train = OneStep(config, options.seed), config.data, config.train
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=data.group_size * data.groups_per_batch,
            num_generations=data.group_size,
            learning_rate=train.rate,
            lr_scheduler_type="constant",
            weight_decay=train.weight_decay,
            max_grad_norm=train.grad_clip,
            max_completion_length=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            top_k=0,
            beta=0.0,
            loss_type="grpo",
            num_train_epochs=100,
            seed=options.seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=tasks.reward,
            args=settings,
            train_dataset=Dataset.from_generator(tasks.rows, cache_dir=scratch),
            processing_class=ScreenProcessor(images, AutoTokenizer.from_pretrained(folder)),
            callbacks=[Until(options.minutes)],
        )
        print(json.dumps({"trajectories": 0}), flush=True)
        trainer.train()


if __name__ == "__main__":
    main()
