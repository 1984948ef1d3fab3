"""How much work do trees save through recurrent layers, against each path alone, with equal gradients?

    python benchmarks/speed/hybrid.py [--rounds 3] [--out benchmarks/results/hybrid.json]

The model is a random qwen3_5 (scripts/small_models.py) of 8 layers of 256, six of which are recurrent, in
float32 on one thread. Two batches of random tokens and screens of 64 tokens are trained on:

- `group`: eight trajectories of one task, which share their first screen, of three steps each;
- `evicted`: one trajectory of 16 steps, whose history drops all but 3 screens when it has 7.

The gradient of the same loss is computed in three ways, one after another in each round:

- `steps`: each step by itself, prompt and completion, as a trainer does that knows no trees;
- `chains`: the steps of a trajectory whose prompts extend one another as one sequence, by itself;
- `trees`: as the trainer does it (dart_cli/policy/state_plan.py), each shared token once.

Of each way: tokens that pass through the language model, CPU seconds of forward and backward pass (the median
of the rounds), and the most bytes of tensors at once, gradients included and parameters not. `plan_share` is the share of the CPU seconds that go into the index tables.

The limit that trees approach: each distinct token once. Ratios are those of `steps` to `trees`, over both batches
together; `tree_gradient_difference` is the largest over parameters of the difference's norm divided by the norm.
The last line is JSON; in the file, keys of other benchmarks are kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed.packing import Gradients, alone, difference, packed, rounded, timed
from benchmarks.speed.playing import limit_torch
from bus.messages import Batch
from bus.packed import float64s, int32s
from dart_cli.config.schema import Config, ModelConfig
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep
from dart_cli.doctor.logprob_check import draw
from dart_cli.policy import packed as packed_policy
from dart_cli.train.trained_policy import TrainModel
from envs.contract.blobs import content_hash
from scripts.small_models import FAMILIES, build

CLASS = "qwen3_5"
HIDDEN, LAYERS = 256, 8
SCREEN = (256, 256)  # pixels: 64 tokens
INSTRUCTION, BETWEEN, COMPLETION = 40, 6, 24  # tokens
PACK_TOKENS = 8192


def model_of(folder: Path) -> TrainModel:
    """Return the trainer's model, with a frozen tower."""
    small = copy.deepcopy(dict(FAMILIES[CLASS].config))
    small["text_config"] |= {
        "hidden_size": HIDDEN,
        "intermediate_size": 704,
        "num_hidden_layers": LAYERS,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (LAYERS // 4),
        "num_attention_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    small["vision_config"]["out_hidden_size"] = HIDDEN
    build(CLASS, folder, sizes=small)
    return TrainModel.load(Config(model=ModelConfig(path=str(folder), freeze_vision=True)))


class Author:
    """Writes steps of random tokens and screens."""

    def __init__(self, model: TrainModel) -> None:
        self._policy = model.policy
        self._dice = random.Random(1)
        self.images: dict[str, bytes] = {}

    def text(self, count: int) -> list[int]:
        """Return tokens of bytes."""
        return [self._dice.randrange(20, 250) for _ in range(count)]

    def screen(self) -> str:
        """Draw a screen and return its name."""
        blob = draw(self._dice, *SCREEN)
        self.images[name := content_hash(blob)] = blob
        return name

    def prompt(self, instruction: list[int], turns: list[tuple[str, list[int]]]) -> list[int]:
        """Return the tokens of an instruction, and of turns: a screen and the text behind it."""
        prompt = list(instruction)
        for name, after in turns:
            count = self._policy.images.token_count(self.images[name], name)
            prompt += [*[self._policy.image_token_id] * count, *after]
        return prompt

    def trajectory(
        self, name: str, first: str, instruction: list[int], steps: int, most: int, fewest: int
    ) -> list[BatchStep]:
        """Return steps whose history has up to `most` screens, and after one more the last `fewest`."""
        turns = [(first, self.text(0))]
        rows: list[BatchStep] = []
        for step in range(steps):
            completion = self.text(COMPLETION)
            rows.append(
                BatchStep(
                    group_id="g",
                    trajectory_id=name,
                    step=step,
                    prompt_token_ids=int32s(self.prompt(instruction, turns)),
                    token_ids=int32s(completion),
                    image_hashes=[screen for screen, _ in turns],
                    behaviour_logprobs=float64s([-5.0] * COMPLETION),
                    version_spans=[],
                    advantage=self._dice.uniform(-1.5, 1.5),
                    weight=1.0,
                )
            )
            turns[-1] = (turns[-1][0], [*completion, *self.text(BETWEEN)])
            turns.append((self.screen(), []))
            if len(turns) > most:
                turns = turns[-fewest:]
        return rows


def batch_of(author: Author, rows: list[BatchStep]) -> Batch:
    """Return the rows as the trainer gets them."""
    chains, samples = chained(rows)
    names = {name for row in rows for name in row.image_hashes}
    images = {name: author.images[name] for name in names}
    return Batch(
        batch_id=1, group_ids=["g"], temperature=1.0, chains=chains, samples=samples, images=images
    )


def batches(model: TrainModel) -> dict[str, Batch]:
    """Return the two batches of the docstring."""
    author = Author(model)
    instruction, first = author.text(INSTRUCTION), author.screen()
    group = [
        row
        for member in range(8)
        for row in author.trajectory(f"t{member}", first, instruction, 3, 9, 9)
    ]
    evicted = author.trajectory("long", author.screen(), author.text(INSTRUCTION), 16, 7, 3)
    return {"group": batch_of(author, group), "evicted": batch_of(author, evicted)}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make and that are still held, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage not in self._storages:
                    self._storages[storage] = True
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, count: int) -> None:
        self.live -= count


def measured(model: TrainModel, run: Callable[[], int]) -> tuple[int, int, Gradients]:
    """Return the most bytes of tensors at once, the tokens of `run`, and its gradients."""
    with LiveBytes() as counter:
        tokens = run()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.trainable().items()
        if parameter.grad is not None
    }
    model.policy.model.zero_grad(set_to_none=True)
    return counter.peak, tokens, gradients


class PlanClock:
    """Counts the CPU seconds that making plans of recurrent layers takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._plan = packed_policy.plan_layout

    def __enter__(self) -> Self:
        def timed_plan(*inputs: Any) -> Any:
            began = time.process_time()
            plan = self._plan(*inputs)
            self.seconds += time.process_time() - began
            return plan

        packed_policy.plan_layout = timed_plan  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        packed_policy.plan_layout = self._plan


def compared(model: TrainModel, batch: Batch, rounds: int) -> dict[str, Any]:
    """Return the figures of one batch."""
    for name, encoded in batch.images.items():
        model.policy.images.prepare(encoded, name)
    ways: Mapping[str, Callable[[], int]] = {
        "steps": lambda: alone(model, batch),
        "chains": lambda: packed(model, batch, 1),
        "trees": lambda: packed(model, batch, PACK_TOKENS),
    }
    peaks = {name: measured(model, run) for name, run in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    shares: list[float] = []
    for _ in range(rounds):
        for name, run in ways.items():
            with PlanClock() as clock:
                seconds[name].append(timed(model, run))
            if name == "trees":
                shares.append(clock.seconds / seconds[name][-1])
    figures: dict[str, Any] = {
        name: {
            "tokens": tokens,
            "cpu_s": statistics.median(seconds[name]),
            "cpu_s_range": [min(seconds[name]), max(seconds[name])],
            "peak_mb": peak / 1e6,
        }
        for name, (peak, tokens, _) in peaks.items()
    }
    gradients = {name: gradients for name, (_, _, gradients) in peaks.items()}
    return figures | {
        "samples": len(batch.samples),
        "chains_count": len(batch.chains),
        "plan_share": statistics.median(shares),
        "gradient_difference": max(
            difference(gradients["trees"], gradients[name]) for name in ("steps", "chains")
        ),
    }


def main() -> None:
    """Compute both batches in every way; print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    limit_torch()
    with tempfile.TemporaryDirectory() as scratch:
        model = model_of(Path(scratch) / CLASS)
        trees: dict[str, Any] = {}
        for name, batch in batches(model).items():
            trees[name] = rounded(compared(model, batch, options.rounds))
            print(json.dumps({name: trees[name]}), flush=True)

    def ratio(figure: str) -> float:
        sums = [sum(each[way][figure] for each in trees.values()) for way in ("steps", "trees")]
        return float(sums[0] / sums[1])

    result = rounded(
        {
            "tree_tokens_ratio": ratio("tokens"),
            "tree_cpu_ratio": ratio("cpu_s"),
            "tree_gradient_difference": max(each["gradient_difference"] for each in trees.values()),
        }
    )
    result["trees"] = trees | {"rounds": options.rounds, "hidden": HIDDEN, "layers": LAYERS}
    if options.out:
        before = json.loads(options.out.read_text("utf-8")) if options.out.is_file() else {}
        options.out.write_text(json.dumps(before | result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
