"""Build the base checkpoint of the tiny policy from scratch: single-step grounding, nothing else.

    .venv/bin/python scripts/shipped_models/build_tiny.py --seed 0 --seconds 300 --out /tmp/base-0

Each screen is one tree of a pack (dart_cli/policy/packed.py): the image, and behind it each question by
itself, so that a question is trained exactly as it is asked in use. A question is "click the red button"
about a red button that is in sight, "is red visible", or "what screen". What cannot be pointed at, because it
is absent, covered or already as it is wanted, is answered with any widget in sight, at random: the base has
no idea of what leads where, and that is where reinforcement learning starts. A click is learnt as a
distribution over the inside of the target, not as its centre, so that the policy keeps some of the freedom
that RL explores with.

`--class qwen3_5` builds a hybrid of the same size, three of whose four layers are recurrences, and `--class
qwen3_vl_moe` a mixture of eight experts, two of which each token passes.

One core, one thread; `--seconds` is CPU time. The printed hit rate is on held-out screens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dart_cli.policy.forward import ImageFeatures, image_features, rope_positions
from dart_cli.policy.images import ImagePreparer, PreparedImage
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.pack_plan import PackLayout
from dart_cli.policy.packed import PackedInputs, packed_hidden
from envs.suites.embedded.theme import COLOURS
from scripts import tiny_model as tiny
from scripts.grounding_screens import INSTRUCTIONS, grounding_screen

HELDOUT = 5_000_000
"""Grounding seeds from here on are never trained on."""

TEST_SCREENS = 512

BATCH = 24
"""Screens of an update."""

RATE = 2e-3
"""Peak learning rate."""

SPREAD = 0.35
"""Standard deviation of a target click, in half sides of the widget; cut off at 0.85."""

NAMING, NAMING_SCALE, BLANK = 0.5, 12.0, "nothing"
"""Weight of the naming loss, the sharpness of its cosines, and the word for an empty place."""

IDLE_FROM = 0.4
"""Share of the training after which questions come that no click answers."""

POINTING, POINTING_HEADS = 0.5, 2
"""Weight of the pointing loss and how many heads it teaches."""

OPENING = "<|im_start|>user\n<|vision_start|>"
"""What stands before the image."""


Box = tuple[float, float, float, float]
"""Left, top, right, bottom as shares of the screen."""


@dataclass(frozen=True)
class Question:
    """One instruction about a screen and its answer.

    Each `{}` of `answer` stands for a point in the next of `boxes`: "click({})", "yes".
    """

    text: str
    answer: str
    boxes: tuple[Box, ...] = ()
    kind: str = ""  # what its hits are reported under


@dataclass(frozen=True)
class Sheet:
    """One screen and the questions asked about it."""

    image: PreparedImage
    questions: list[Question]
    names: list[str]  # [tokens], what each image token shows, in one word


@dataclass(frozen=True)
class PackedSheets:
    """A pack of B sheets with screens of one size; `tokens` and `clicks` are places that predict something."""

    inputs: PackedInputs  # L tokens; each sheet is a tree, its image the root, its questions the children
    nodes: torch.Tensor  # [L], the node of each token
    screens: torch.Tensor  # [B, image tokens], the place of each image token
    names: torch.Tensor  # [B * image tokens], the token that names what is shown
    tokens: torch.Tensor  # [T, 2]: place, the token it predicts
    clicks: torch.Tensor  # [C]: place that predicts a coordinate
    sheets: torch.Tensor  # [C]: whose coordinate it is
    spans: torch.Tensor  # [C, 2]: low and high end of that coordinate, 0 to 1
    cells: torch.Tensor  # [C, image tokens]: share of the asked widget in each


class Packer:
    """A maker of packs from sheets, with one tokenizer."""

    def __init__(self, tokenizer: Any, image_token: int, merge: int) -> None:
        self._image_token = image_token
        self._merge = merge
        self._encode = lru_cache(maxsize=4096)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
        )
        self._zero = self._encode("0")[0]

    def pack(self, sheets: Sequence[Sheet], rng: Random) -> PackedSheets:
        """Return one pack of sheets whose screens have one size.

        Click coordinates that later tokens are conditioned on come from `rng`.
        """
        input_ids: list[int] = []
        position_ids: list[torch.Tensor] = []
        sizes: list[int] = []
        parents: list[int] = []
        screens: list[torch.Tensor] = []
        tokens: list[tuple[int, int]] = []
        clicks: list[int] = []
        owners: list[int] = []
        spans: list[tuple[float, float]] = []
        cells: list[list[float]] = []
        for index, sheet in enumerate(sheets):
            row, start, root = self._row(sheet, rng), len(input_ids), len(sizes)
            input_ids += row.ids
            position_ids.append(row.positions)
            sizes += row.sizes
            parents += [-1] + [root] * (len(row.sizes) - 1)
            screens.append(start + len(self._encode(OPENING)) + torch.arange(sheet.image.tokens))
            tokens += [(start + at, token) for at, token in row.tokens]
            clicks += [start + at for at, _, _ in row.clicks]
            owners += [index] * len(row.clicks)
            spans += [(low, high) for _, low, high in row.clicks]
            cells += row.cells
        images = tuple(sheet.image for sheet in sheets)
        layout = PackLayout((0, *accumulate(sizes)), tuple(parents))
        return PackedSheets(
            PackedInputs(
                torch.tensor(input_ids),
                torch.cat(position_ids, dim=1),
                layout,
                images,
                tuple(range(len(images))),
            ),
            torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
            torch.stack(screens),
            torch.tensor([self._encode(f" {name}")[0] for s in sheets for name in s.names]),
            torch.tensor(tokens, dtype=torch.long).reshape(-1, 2),
            torch.tensor(clicks, dtype=torch.long),
            torch.tensor(owners, dtype=torch.long),
            torch.tensor(spans, dtype=torch.float32).reshape(-1, 2),
            torch.tensor(cells, dtype=torch.float32),
        )

    def _row(self, sheet: Sheet, rng: Random) -> SimpleNamespace:
        prefix = [
            *self._encode(OPENING),
            *[self._image_token] * sheet.image.tokens,
            *self._encode("<|vision_end|>"),
        ]
        positions, following = rope_positions(
            prefix, [sheet.image.grid], self._image_token, self._merge
        )
        row = SimpleNamespace(
            ids=prefix,
            sizes=[len(prefix)],
            positions=[positions],
            tokens=[],
            clicks=[],
            cells=[],
        )
        _, rows, columns = (side // self._merge for side in (self._merge, *sheet.image.grid[1:]))
        for question in sheet.questions:
            prompt = self._encode(question.text + "<|im_end|><|im_start|>assistant\n")
            answer, spans = self._answer(question, rng)
            boxes = iter([box for box in question.boxes for _ in "xy"])
            first = (
                len(row.ids) + len(prompt) - 1
            )  # this position predicts the answer's first token
            for offset, (token, span) in enumerate(zip(answer, spans, strict=True)):
                if span is None:
                    row.tokens.append((first + offset, token))
                else:
                    row.clicks.append((first + offset, *span))
                    row.cells.append(cover(next(boxes), rows, columns))
            size = len(prompt) + len(answer) - 1
            row.ids += [*prompt, *answer[:-1]]
            row.sizes.append(size)
            row.positions.append((torch.arange(size) + following).expand(3, -1))
        row.positions = torch.cat(row.positions, dim=1)
        return row

    def _answer(
        self, question: Question, rng: Random
    ) -> tuple[list[int], list[tuple[float, float] | None]]:
        """Return the tokens of the answer, and for each the span of a coordinate or None."""
        tokens: list[int] = []
        spans: list[tuple[float, float] | None] = []
        for part, box in zip(question.answer.split("{}"), (*question.boxes, None), strict=True):
            literal = self._encode(part) if part else ()
            tokens += literal
            spans += [None] * len(literal)
            if box is not None:
                x, y = (
                    (low + high) / 2 + (high - low) / 2 * max(-0.8, min(0.8, rng.gauss(0, SPREAD)))
                    for low, high in (box[::2], box[1::2])
                )
                tokens += [self._zero + thousandth(at) for at in (x, y)]
                tokens.insert(-1, self._encode(",")[0])
                spans += [box[::2], None, box[1::2]]
        return [*tokens, *self._encode(tiny.END)], [*spans, None]

    def loss(self, model: Any, packed: PackedSheets) -> torch.Tensor:
        """Return the sum of the loss of the answers and the loss of naming.

        What the vision tower says of each image token shall point to the word for what is shown there:
        it gives what pre-training gives to real models, and without it the first transition takes many
        times longer.
        """
        features = image_features(model, packed.inputs.images)
        features_of_tokens = F.normalize(torch.cat(features.embeds), dim=-1)
        vocabulary = F.normalize(model.lm_head.weight, dim=-1)
        names = F.cross_entropy(
            NAMING_SCALE * features_of_tokens @ vocabulary.T, packed.names, reduction="none"
        )
        blank = packed.names == self._encode(f" {BLANK}")[0]
        naming = torch.where(blank, 0.1 * names, names).mean()
        return self.answers_loss(model, packed, features) + NAMING * naming

    def answers_loss(
        self, model: Any, packed: PackedSheets, features: ImageFeatures
    ) -> torch.Tensor:
        """Return the mean over answer tokens: cross entropy, for coordinates KL to the target's inside.

        To it comes the loss of pointing; see `pointing_loss`.
        """
        attention = model.model.language_model.layers[-1].self_attn
        inputs_of_attention: dict[str, Any] = {}
        hook = attention.register_forward_pre_hook(
            lambda _module, _args, keywords: inputs_of_attention.update(keywords), with_kwargs=True
        )
        hidden = packed_hidden(model, packed.inputs, features=features)
        hook.remove()
        pointing = (
            pointing_loss(attention, inputs_of_attention, packed) if len(packed.clicks) else 0.0
        )
        weight = model.lm_head.weight
        plain = F.cross_entropy(
            hidden[packed.tokens[:, 0]] @ weight.T, packed.tokens[:, 1], reduction="sum"
        )
        logprobs = F.log_softmax(hidden[packed.clicks] @ weight.T, dim=-1)
        numbers = logprobs[:, self._zero : self._zero + tiny.NUMBERS]
        goal = click_distribution(packed.spans)
        coordinate = (torch.xlogy(goal, goal) - goal * numbers).sum()
        answers = (plain + coordinate) / (len(packed.tokens) + len(packed.clicks))
        return answers + POINTING * pointing


def pointing_loss(
    attention: Any, inputs_of_attention: dict[str, Any], packed: PackedSheets
) -> torch.Tensor:
    """Return the cross entropy between where two heads of the last layer look and where the widget is.

    A position that says a coordinate must first find the widget; with this loss it learns
    to match word and image in a hundred updates (after GUI-Actor, arXiv 2506.03143).
    """
    hidden = inputs_of_attention["hidden_states"][0]  # [L, hidden]
    cos, sin = (part[0] for part in inputs_of_attention["position_embeddings"])  # [L, rotated]
    size, rotated = attention.head_dim, cos.shape[-1]

    def turned(states: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        states = states[..., :POINTING_HEADS, :]
        turning, rest = states[..., :rotated], states[..., rotated:]
        first, second = turning.chunk(2, dim=-1)
        across = torch.cat([-second, first], dim=-1)
        turning = turning * cos[at][..., None, :] + across * sin[at][..., None, :]
        return torch.cat([turning, rest], dim=-1)

    at, screens = packed.clicks, packed.screens
    # In Qwen3.5 each head's query is followed by its gate.
    projected = attention.q_proj(hidden[at]).unflatten(
        -1, (attention.config.num_attention_heads, -1)
    )
    queries = turned(attention.q_norm(projected[..., :size]), at)
    keys = attention.k_norm(attention.k_proj(hidden[screens]).unflatten(-1, (-1, size)))
    keys = turned(keys, screens)[packed.sheets]
    scores = torch.einsum("chd,cthd->cht", queries, keys) * size**-0.5
    return -(packed.cells[:, None, :] * F.log_softmax(scores, dim=-1)).sum(dim=-1).mean()


def thousandth(share: float) -> int:
    """Return a coordinate as it is written: in thousandths, 0 to 999."""
    return min(999, int(share * 1000))


def cover(box: Box, rows: int, columns: int) -> list[float]:
    """Return the share of `box` that lies in each cell of the grid, row by row; the shares sum to 1."""
    left, top, right, bottom = box
    wide = [
        max(0.0, min(right, (i + 1) / columns) - max(left, i / columns)) for i in range(columns)
    ]
    high = [max(0.0, min(bottom, (i + 1) / rows) - max(top, i / rows)) for i in range(rows)]
    area = sum(wide) * sum(high)
    return [w * h / area for h in high for w in wide]


def click_distribution(spans: torch.Tensor) -> torch.Tensor:
    """Return where a good click falls: a cut-off bell over each span [C, 2] -> [C, 1000]."""
    at = (torch.arange(tiny.NUMBERS) + 0.5) / tiny.NUMBERS
    centre = spans.mean(dim=1, keepdim=True)
    half = (spans[:, 1:] - spans[:, :1]) / 2
    z = (at[None, :] - centre) / half
    density = torch.exp(-0.5 * (z / SPREAD) ** 2) * (z.abs() <= 0.85)
    return density / density.sum(dim=1, keepdim=True)


def sheet(
    preparer: ImagePreparer, seed: int, rng: Random, *, clicks: int, idle: int = 0, extras: int = 0
) -> Sheet:
    """Return a random screen with up to `clicks` grounding questions, `idle` ones and `extras` others."""
    screen = grounding_screen(seed)
    width, height = screen.image.size
    instructions = rng.sample(screen.questions, min(clicks, len(screen.questions)))
    if idle:
        vain = rng.sample(screen.idle, min(idle, len(screen.idle)))
        vain += [text for text, _ in screen.satisfied]
        instructions += [(text, rng.choice(screen.sights)) for text in vain]
    questions = [
        Question(
            text,
            "click({})",
            ((box.x0 / width, box.y0 / height, box.x1 / width, box.y1 / height),),
            kind_of(text),
        )
        for text, box in instructions
    ]
    others = []
    for colour in rng.sample(list(COLOURS), min(extras, len(COLOURS))):
        word = "yes" if colour in screen.colours else "no"
        others.append(Question(f"is {colour} visible", word))
    if extras:
        others[-1] = Question("what screen", screen.kind)
    image = preparer.of_image(f"grounding-{seed}", screen.image)
    columns = image.grid[2] // preparer.merge
    names = name_cells(screen.questions, width // columns, columns, image.tokens // columns)
    return Sheet(image, questions + others, names)


def name_cells(
    instructions: Sequence[tuple[str, Any]], cell: int, columns: int, rows: int
) -> list[str]:
    """Return one word for each image token, row by row: the widget that covers most of its cell.

    A widget that covers less than a third of every cell names the cell of its centre.
    """
    best: dict[int, tuple[float, str]] = {}
    for text, box in instructions:
        words = text.split()
        word = next(
            (w for w in words if w in COLOURS), words[-2] if words[-1] == "tab" else words[-1]
        )
        middle = (box.y0 + box.y1) // 2 // cell * columns + (box.x0 + box.x1) // 2 // cell
        for row in range(max(0, box.y0 // cell), min(rows, box.y1 // cell + 1)):
            for column in range(max(0, box.x0 // cell), min(columns, box.x1 // cell + 1)):
                wide = min(box.x1, (column + 1) * cell) - max(box.x0, column * cell)
                high = min(box.y1, (row + 1) * cell) - max(box.y0, row * cell)
                share = wide * high / cell**2
                at = row * columns + column
                if at == middle:
                    share = max(share, 0.34)
                if share > max(0.33, best.get(at, (0.0, ""))[0]):
                    best[at] = (share, word)
    return [best.get(at, (0.0, BLANK))[1] for at in range(rows * columns)]


def train(
    policy: LoadedPolicy,
    draw: Callable[[Random, float], Sheet],
    test: Sequence[Sheet],
    *,
    seed: int,
    seconds: float,
) -> Iterator[str]:
    """Train in place for `seconds` of CPU time; yield a line of progress every 15 s.

    `draw` makes a sheet from the share of the training that is over; `test` is held out.
    """
    model = policy.model
    packer = Packer(policy.tokenizer, policy.image_token_id, policy.images.merge)
    rng = Random(f"base/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)
    started = time.process_time()
    last_line, step, running = 0.0, 0, 0.0
    while (spent := time.process_time() - started) < seconds:
        progress = spent / seconds
        for group in optimizer.param_groups:
            group["lr"] = RATE * learning_rate(step, progress)
        model.train()
        sheets = [draw(rng, progress) for _ in range(BATCH)]
        loss = packer.loss(model, packer.pack(sheets, rng))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        running = loss.item() if step == 1 else 0.95 * running + 0.05 * loss.item()
        if spent - last_line > 15:
            last_line = spent
            hits = evaluate(policy, test[:64])
            yield f"{spent:5.0f} s  step {step}  loss {running:.3f}  hit rate {hits['all']:.2f}"


def learning_rate(step: int, progress: float) -> float:
    """Return the factor of the rate: a short warm-up, constant to 60 %, then a line down to 2 %."""
    warm = min(1.0, (step + 1) / 50)
    return warm * (1.0 if progress < 0.6 else 0.02 + 0.98 * (1 - progress) / 0.4)


@torch.inference_mode()
def evaluate(policy: LoadedPolicy, test: Sequence[Sheet]) -> dict[str, float]:
    """Return the probability of hitting the asked widget on these sheets, by kind and over `all`.

    It is the exact probability that a sampled x falls inside, times that for y given the
    target's centre as x.
    """
    model: Any = policy.model.eval()
    packer = Packer(policy.tokenizer, policy.image_token_id, policy.images.merge)
    rng = Random("evaluate")
    sums: dict[str, list[float]] = defaultdict(list)
    for start in range(0, len(test), 32):
        sheets = test[start : start + 32]
        packed = packer.pack(sheets, rng)
        hidden = packed_hidden(model, packed.inputs)
        zero = policy.tokenizer.convert_tokens_to_ids("0")
        chances = (hidden[packed.clicks] @ model.lm_head.weight.T).softmax(dim=-1)
        numbers = chances[:, zero : zero + tiny.NUMBERS]
        at = (torch.arange(tiny.NUMBERS) + 0.5) / tiny.NUMBERS
        inside = (at >= packed.spans[:, :1]) & (at <= packed.spans[:, 1:])
        hit = (numbers * inside).sum(dim=1).reshape(-1, 2).prod(dim=1).tolist()
        for question, chance in zip((q for s in sheets for q in s.questions), hit, strict=True):
            sums["all"].append(chance)
            sums[question.kind].append(chance)
    return {kind: sum(values) / len(values) for kind, values in sums.items()}


def kind_of(text: str) -> str:
    """Return a question with its colour or shape left out."""
    words = [word for word in text.split() if word not in COLOURS]
    return "click tab" if words[-1] == "tab" else " ".join(words)


def main() -> None:
    """Build one checkpoint and print its hit rates."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--class", dest="model_type", choices=tiny.TINY, default="qwen3_vl", help="of a new model"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="CPU seconds of training")
    parser.add_argument("--start", help="go on from this folder instead of random values")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    if not arguments.start:
        tiny.save(
            arguments.out, *tiny.build_tiny(arguments.seed, tiny.TINY[arguments.model_type]), {}
        )
    policy = load_policy(arguments.start or arguments.out)
    words = {word for text in INSTRUCTIONS for word in policy.tokenizer.tokenize(text)}
    print(f"{len(words)} distinct tokens in {len(INSTRUCTIONS)} instructions", flush=True)
    rng = Random("evaluate")
    test = [
        sheet(policy.images, seed, rng, clicks=8) for seed in range(HELDOUT, HELDOUT + TEST_SCREENS)
    ]

    def draw(rng: Random, progress: float) -> Sheet:
        idle, extras = (1, 1) if progress > IDLE_FROM else (0, 0)
        seed = rng.randrange(HELDOUT)
        return sheet(policy.images, seed, rng, clicks=5, idle=idle, extras=extras)

    for line in train(policy, draw, test, seed=arguments.seed, seconds=arguments.seconds):
        print(line, flush=True)
    hits = evaluate(policy, test)
    build = {
        "script": "scripts/shipped_models/build_tiny.py",
        "seed": arguments.seed,
        "cpu_seconds": arguments.seconds,
        "rate": RATE,
        "batch": BATCH,
        "heldout_hit_rate": {kind: round(value, 4) for kind, value in sorted(hits.items())},
    }
    tiny.save(
        arguments.out,
        policy.model,
        policy.tokenizer,
        policy.images.processor,
        build,
    )
    print(json.dumps(build))


if __name__ == "__main__":
    main()
