"""Teach the tiny model to read prompts with several screens, and a little of suite `recall`.

    .venv/bin/python scripts/shipped_models/build_recall.py --updates 30 --out runs/recall-base

`builtin:tiny` has never seen a past turn: behind one it writes no action. Each example is the last page of
a slide show in a prompt of 1 to 7 screens, all numbers alike, so that the base prefers no history. Its
answer is the place of the button where the prompt still shows it, and any of the four where it does not.
Of past turns only the form of the action is taught. Two heads of the last layer are told where to look
(scripts/shipped_models/build_tiny.py, pointing). The vision tower stays as it is.

A short training on purpose: how to use the past is left to reinforcement learning. The same seed and
number of updates give the same folder. The printed hit rate is on held-out shows, by lag.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.messages import Turn
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import make_action_parser
from dart_cli.policy.forward import ModelInputs, encoder_outputs, image_features
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from envs.contract.actions import Click
from envs.suites.embedded.env import EmbeddedEnv
from envs.suites.embedded.suites import RecallSuite
from envs.suites.embedded.tasks.mini import RecallScene
from scripts import tiny_model as tiny
from scripts.shipped_models.build_tiny import POINTING_HEADS, SPREAD, cover

MOST_SCREENS = 7
HELDOUT = 500_000
"""Seeds of shows from here on are never trained on."""

TEST_SHOWS = 64  # of each lag
BATCH = 16
RATE = 2e-3
SIDE = tiny.SCREEN
CELLS = SIDE // 28  # image tokens of a screen, each way


@dataclass(frozen=True)
class Example:
    """One prompt with its answer."""

    token_ids: list[int]  # [L]
    images: list[PreparedImage]
    form: list[
        int
    ]  # positions whose token is taught: all of the answer, of past turns all but numbers
    numbers: list[int]  # the two positions of the answer's coordinates
    box: tuple[float, float, float, float]  # of the answer, 0 to 1
    shown_in: int  # the image that shows it
    recalled: bool  # that image is a past one


class Shows:
    """A player of slide shows to their last page, which makes questions about it."""

    def __init__(self, policy: LoadedPolicy) -> None:
        self._policy = policy
        self._renderer = PromptRenderer(policy)
        self._action_parser = make_action_parser("compact")
        self._coordinates = make_coordinate_map("thousandths", SIDE, SIDE)
        self._env: EmbeddedEnv = RecallSuite().make_env()

    def example(self, rng: Random, lag: int, seed: int, screens: int) -> Example:
        """Return the last page of the show `seed` behind at most `screens - 1` past ones."""
        observation, _ = self._env.reset(seed=seed, options={"task": f"recall/{lag}"})
        scene: Any = self._env._scene  # noqa: SLF001 - where the button was is no part of a screen
        assert isinstance(scene, RecallScene)
        shots, clicks = [observation.screenshot], []
        for _ in range(scene.last):
            anywhere = rng.randrange(1000), rng.randrange(1000)
            clicks.append(self._click(*anywhere))
            x, y = self._coordinates.to_screen(*anywhere)
            observation = self._env.step(Click(x=x, y=y))[0]
            shots.append(observation.screenshot)
        first = max(0, scene.last + 1 - screens)
        recalled = first <= scene.at
        place = scene.place if recalled else rng.randrange(len(scene.places))
        left, top, right, bottom = (side / SIDE for side in scene.places[place])
        answer = self._click(_inside(rng, left, right), _inside(rng, top, bottom))
        turns = [
            Turn(text="", screenshot=shots[page], token_ids=clicks[page])
            for page in range(first, scene.last)
        ]
        prompt = self._renderer.render(scene.instruction, turns, shots[scene.last])
        token_ids = [*prompt.token_ids, *answer]
        start = len(prompt.token_ids)
        head, _, comma, _, close, end = answer
        past = [at for at in range(start) if token_ids[at] == head]
        form = [at + offset for at in past for offset in (0, 2, 4, 5)]
        assert all(token_ids[at + 2] == comma for at in past)
        assert (close, end) == tuple(token_ids[-2:])
        return Example(
            token_ids,
            [self._policy.images.prepare(image) for image in prompt.images],
            [*form, *range(start, len(token_ids))],
            [start + 1, start + 3],
            (left, top, right, bottom),
            scene.at - first if recalled else scene.last - first,
            recalled,
        )

    def _click(self, x: int, y: int) -> list[int]:
        return self._policy.encode_completion(f"click({x},{y})")


def _inside(rng: Random, low: float, high: float) -> int:
    """Return a number of thousandths between two sides, near their middle."""
    offset = max(-0.8, min(0.8, rng.gauss(0, SPREAD)))
    return min(999, int(1000 * ((low + high) / 2 + (high - low) / 2 * offset)))


@dataclass(frozen=True)
class Pass:
    """A forward pass over examples: hidden states, and the inputs of the last layer's attention."""

    inputs: ModelInputs
    hidden: torch.Tensor  # [B, L, hidden], of the last layer
    entering: torch.Tensor  # [B, L, hidden], what its attention reads
    turns: tuple[torch.Tensor, torch.Tensor]  # cosines and sines [B, L, head]
    offsets: list[int]  # [B], padding before each example


def run(policy: LoadedPolicy, examples: Sequence[Example]) -> Pass:
    """Return the language model's forward pass; the vision tower gets no gradient."""
    model: Any = policy.model
    inputs = policy.inputs_of(
        [example.token_ids for example in examples], [e.images for e in examples]
    )
    with torch.no_grad():
        features = image_features(model, inputs.images)
    inputs_of_attention: dict[str, Any] = {}
    hook = model.model.language_model.layers[-1].self_attn.register_forward_pre_hook(
        lambda _module, _args, keywords: inputs_of_attention.update(keywords), with_kwargs=True
    )
    hidden = model.model(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        mm_encoder_outputs=encoder_outputs(features, inputs.image_order),
        use_cache=False,
    ).last_hidden_state
    hook.remove()
    longest = inputs.input_ids.shape[1]
    offsets = [longest - len(example.token_ids) for example in examples]
    return Pass(
        inputs,
        hidden,
        inputs_of_attention["hidden_states"],
        inputs_of_attention["position_embeddings"],
        offsets,
    )


def loss(policy: LoadedPolicy, examples: Sequence[Example]) -> torch.Tensor:
    """Return the cross entropy of the taught tokens, and of where two heads look when a number is written."""
    forward = run(policy, examples)
    model: Any = policy.model
    rows = [row for row, example in enumerate(examples) for _ in example.form]
    places = [
        forward.offsets[row] + at - 1 for row, example in enumerate(examples) for at in example.form
    ]
    targets = torch.tensor([example.token_ids[at] for example in examples for at in example.form])
    words = F.cross_entropy(forward.hidden[rows, places] @ model.lm_head.weight.T, targets)
    attention = model.model.language_model.layers[-1].self_attn
    cos, sin = forward.turns
    size = cos.shape[-1]

    def turned(states: torch.Tensor) -> torch.Tensor:
        one, two = states.chunk(2, dim=-1)
        whole = states * cos[..., None, :] + torch.cat([-two, one], dim=-1) * sin[..., None, :]
        return whole[:, :, :POINTING_HEADS]

    keys = turned(attention.k_norm(attention.k_proj(forward.entering).unflatten(-1, (-1, size))))
    queries = turned(attention.q_norm(attention.q_proj(forward.entering).unflatten(-1, (-1, size))))
    is_image = forward.inputs.input_ids == policy.image_token_id
    pointing = []
    for row, example in enumerate(examples):
        asking = [forward.offsets[row] + at - 1 for at in example.numbers]
        looking = is_image[row].nonzero()[:, 0]
        scores = torch.einsum("chd,thd->cht", queries[row, asking], keys[row, looking])
        goal = torch.zeros(len(looking))
        start = example.shown_in * CELLS**2
        goal[start : start + CELLS**2] = torch.tensor(cover(example.box, CELLS, CELLS))
        pointing.append(-(goal * F.log_softmax(scores * size**-0.5, dim=-1)).sum(dim=-1).mean())
    return words + torch.stack(pointing).mean()


@torch.no_grad()
def hit_rate(policy: LoadedPolicy, examples: Sequence[Example]) -> float:
    """Return the probability of clicking where the button was, over the examples that still show it."""
    model: Any = policy.model
    zero = int(policy.tokenizer.convert_tokens_to_ids("0"))
    recalled = [example for example in examples if example.recalled]
    total = 0.0
    for start in range(0, len(recalled), BATCH):
        part = recalled[start : start + BATCH]
        forward = run(policy, part)
        for row, each in enumerate(part):
            left, top, right, bottom = each.box
            chance = 1.0
            for at, low, high in zip(each.numbers, (left, top), (right, bottom), strict=True):
                hidden = forward.hidden[row, forward.offsets[row] + at - 1]
                numbers = (hidden @ model.lm_head.weight.T).softmax(dim=-1)[zero : zero + 1000]
                chance *= float(numbers[math.ceil(low * 1000) : int(high * 1000)].sum())
            total += chance
    return total / max(1, len(recalled))


def main() -> None:
    """Build one folder and print its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    policy = load_policy("builtin:tiny")
    model: Any = policy.model
    model.model.visual.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)
    rng = Random(f"recall/{arguments.seed}")
    shows = Shows(policy)
    lags = list(RecallSuite.lags)
    for update in range(arguments.updates):
        left = (arguments.updates - update) / arguments.updates
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (update + 1) / 20, left / 0.4)
        examples = [
            shows.example(
                rng, rng.choice(lags), rng.randrange(HELDOUT), rng.randint(1, MOST_SCREENS)
            )
            for _ in range(BATCH)
        ]
        value = loss(policy, examples)
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if (update + 1) % 10 == 0:
            print(f"update {update + 1}  loss {value.item():.3f}", flush=True)
    hits = {}
    for lag in lags:
        seeds = range(HELDOUT, HELDOUT + TEST_SHOWS)
        examples_of_lag = [shows.example(rng, lag, seed, MOST_SCREENS) for seed in seeds]
        hits[lag] = round(hit_rate(policy, examples_of_lag), 4)
    build = {
        "script": "scripts/shipped_models/build_recall.py",
        "seed": arguments.seed,
        "updates": arguments.updates,
        "heldout_hit_rate_by_lag": hits,
    }
    tiny.save(arguments.out, model, policy.tokenizer, policy.images.processor, build)
    print(json.dumps(build))


if __name__ == "__main__":
    main()
