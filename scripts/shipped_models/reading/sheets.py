"""Scenes as training sheets: questions to answer, and what each image token shows.

    ReadSheet     a sheet of scripts/shipped_models/build_tiny.py with dense targets for each image token
    read_sheet    a Scene and its questions -> ReadSheet
    DenseHeads    linear heads on image tokens that say characters, looks and places; thrown away after training
    dense_loss    their loss

Each image token says which characters have their middle in its left and in its right half (one class
per printable ASCII character), and of the thing that covers most of it its role, colour, shape and
whether it is ticked. This is the dense supervision that questions alone lack: with it letters are known
after minutes, and words follow. It also says where that thing is, through the numbers that the policy
writes: a model that looked at the right button used to miss it, by a twentieth of the screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
import torch.nn.functional as F

from dart_cli.language.history import Previous
from dart_cli.policy.forward import ImageFeatures
from dart_cli.policy.images import ImagePreparer
from scripts.shipped_models.build_tiny import Question, Sheet, click_distribution
from scripts.shipped_models.reading.scene import Box, Query, Scene, Thing

CHARACTERS = 95
"""Classes of a half token: 0 is none, 1 to 94 are ASCII 33 to 126."""

EMPTY = 0.15
"""Weight of a half token without a character, and of a token without a thing."""

LOOKS: dict[str, tuple[str, ...]] = {
    "role": (
        "",
        *"button link field checkbox radio tab row option shape icon heading text".split(),
        *"slider cell menu image digit word number item select toggle covered file folder".split(),
        "scrollbar",
    ),
    "colour": (
        "",
        *"red green blue yellow orange purple pink cyan magenta brown black white grey teal".split(),
        *"olive navy lime maroon aqua fuchsia".split(),
    ),
    "shape": (
        "",
        *"circle square triangle rectangle star diamond heart cross letter digit".split(),
    ),
    "checked": ("", "ticked", "clear"),
}
"""What the heads say of the thing that a token shows; the first is for no thing, or one without it."""

SAME = {"gray": "grey"}

LOOK, PLACE = 0.3, 0.5
"""Weights of each look, and of places, beside the characters."""

UNTOLD = -100
"""A class that teaches nothing."""


@dataclass(frozen=True)
class ReadSheet(Sheet):
    """A sheet, and what each of its T image tokens shows."""

    letters: torch.Tensor  # [N, 3], int64: token, half, class of CHARACTERS
    unread: torch.Tensor  # [T], bool: holds text whose characters are not known
    looks: torch.Tensor  # [T, len(LOOKS)], int64
    spans: (
        torch.Tensor
    )  # [T, 2, 2]: from and to of that thing across and down, in shares; 0 for none


def read_sheet(preparer: ImagePreparer, scene: Scene, queries: Sequence[Query]) -> ReadSheet:
    """Return a scene with these questions."""
    picture = scene.image
    width, height = picture.size
    image = preparer.of_image(scene.key, picture)
    rows, columns = (side // preparer.merge for side in image.grid[1:])

    def share(box: Box) -> Box:
        left, top, right, bottom = box
        return (
            min(max(left / width, 0.0), 0.998),
            min(max(top / height, 0.0), 0.998),
            min(max(right / width, 0.002), 1.0),
            min(max(bottom / height, 0.002), 1.0),
        )

    letters = []
    for glyph in scene.glyphs:
        column, row = glyph.x / width * columns, glyph.y / height * rows
        kind = ord(glyph.character) - 32
        if 0 <= column < columns and 0 <= row < rows and 0 < kind < CHARACTERS:
            half = int(column % 1 >= 0.5)
            letters.append((int(row) * columns + int(column), half, kind))
    unread = torch.zeros(rows * columns, dtype=torch.bool)
    for box in map(share, scene.unread):
        for at in _touched(box, rows, columns, 0.1):
            unread[at] = True
    return ReadSheet(
        image,
        [Question(prompt(a), a.answer, tuple(map(share, a.boxes)), a.kind) for a in queries],
        [],
        torch.tensor(letters, dtype=torch.long).reshape(-1, 3),
        unread,
        *_looks_and_spans(((thing, share(thing.box)) for thing in scene.things), rows, columns),
    )


def prompt(query: Query) -> str:
    """Return the text of the prompt, as a `policy.template` of two lines, {instruction} and {previous}, has it."""
    if query.before is None:
        return query.text
    return f"{query.text}\n{Previous().text(query.before)}"


def with_steps(queries: Sequence[Query], rng: Random, share: float) -> list[Query]:
    """Return the same `queries`, a `share` of them with random steps before, which change no answer."""
    results = []
    for query in queries:
        if query.before is None and rng.random() < share:
            steps = (
                f"click({rng.randrange(1000)},{rng.randrange(1000)})"
                for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))
            )
            query = replace(query, before=tuple(steps))
        results.append(query)
    return results


def _touched(box: Box, rows: int, columns: int, least: float) -> Iterable[int]:
    """Yield tokens of which the box covers at least this share of each side, and the token of its middle."""
    left, top, right, bottom = box[0] * columns, box[1] * rows, box[2] * columns, box[3] * rows
    middle = (
        min(columns - 1, int((left + right) / 2)),
        min(rows - 1, int((top + bottom) / 2)),
    )
    for row in range(int(top), min(rows, int(bottom) + 1)):
        for column in range(int(left), min(columns, int(right) + 1)):
            wide = min(right, column + 1) - max(left, column)
            high = min(bottom, row + 1) - max(top, row)
            if min(wide, high) >= least or (column, row) == middle:
                yield row * columns + column


def _looks_and_spans(
    things: Iterable[tuple[Thing, Box]], rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return classes [T, len(LOOKS)] and spans [T, 2, 2] of the smallest thing in each token, or of its cell."""
    looks = [[0] * len(LOOKS)] * (rows * columns)
    spans = [
        ((column / columns, (column + 1) / columns), (row / rows, (row + 1) / rows))
        for row in range(rows)
        for column in range(columns)
    ]
    largest_first = sorted(
        things, key=lambda thing: -(thing[1][2] - thing[1][0]) * (thing[1][3] - thing[1][1])
    )
    for thing, box in largest_first:
        ticked = "" if thing.checked is None else "ticked" if thing.checked else "clear"
        looks_of_thing = (thing.role, thing.colour, thing.shape, ticked)
        classes = [
            names.index(SAME.get(word, word)) if SAME.get(word, word) in names else UNTOLD
            for names, word in zip(LOOKS.values(), looks_of_thing, strict=True)
        ]
        left, top, right, bottom = box
        for at in _touched(box, rows, columns, 0.35):
            looks[at] = classes
            spans[at] = ((left, right), (top, bottom))
    return torch.tensor(looks), torch.tensor(spans)


class DenseHeads(torch.nn.Module):
    """Linear heads that predict what image tokens [T, hidden] show."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.letters = torch.nn.Linear(hidden, 2 * CHARACTERS)
        self.looks = torch.nn.ModuleList(torch.nn.Linear(hidden, len(n)) for n in LOOKS.values())
        self.places = torch.nn.Linear(hidden, 2 * hidden)


def letter_targets(sheets: Sequence[ReadSheet]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a distribution over characters [T, 2, CHARACTERS] of all tokens, and their weight [T, 2]."""
    tokens = sum(sheet.image.tokens for sheet in sheets)
    target = torch.zeros(tokens, 2, CHARACTERS)
    start = 0
    for sheet in sheets:
        at, half, kind = sheet.letters.T
        target[start + at, half, kind] = 1.0
        start += sheet.image.tokens
    some = target.sum(-1) > 0
    target[..., 0] = (~some).float()
    is_read = ~torch.cat([sheet.unread for sheet in sheets])
    weight = torch.where(some, 1.0, EMPTY) * is_read[:, None]
    return target / target.sum(-1, keepdim=True), weight


def dense_loss(
    heads: DenseHeads,
    features: ImageFeatures,
    sheets: Sequence[ReadSheet],
    numbers: torch.Tensor,
) -> torch.Tensor:
    """Return the loss of characters, looks and, through the rows of numbers, places."""
    tokens = torch.cat(features.embeds)
    return (
        letter_loss(heads, tokens, sheets)
        + LOOK * look_loss(heads, tokens, sheets)
        + PLACE * place_loss(heads, tokens, sheets, numbers)
    )


def letter_loss(
    heads: DenseHeads, tokens: torch.Tensor, sheets: Sequence[ReadSheet]
) -> torch.Tensor:
    """Return the cross entropy of the characters, a mean over halves of tokens [T, hidden]."""
    target, weight = letter_targets(sheets)
    logprobs = F.log_softmax(heads.letters(tokens).unflatten(-1, (2, CHARACTERS)), dim=-1)
    return (-(target * logprobs).sum(-1) * weight).sum() / weight.sum().clamp_min(1)


def look_loss(heads: DenseHeads, tokens: torch.Tensor, sheets: Sequence[ReadSheet]) -> torch.Tensor:
    """Return the cross entropy of the looks, each a mean over its tokens."""
    loss = torch.zeros(())
    classes = torch.cat([sheet.looks for sheet in sheets])
    for head, goal in zip(heads.looks, classes.T, strict=True):
        each = F.cross_entropy(head(tokens), goal, reduction="none", ignore_index=UNTOLD)
        heavy = torch.where(goal > 0, 1.0, EMPTY) * (goal != UNTOLD)
        loss = loss + (each * heavy).sum() / heavy.sum().clamp_min(1)
    return loss


def place_loss(
    heads: DenseHeads, tokens: torch.Tensor, sheets: Sequence[ReadSheet], numbers: torch.Tensor
) -> torch.Tensor:
    """Return the KL, nats, between where a good click on a token's thing falls and what its token predicts.

    A mean over tokens [T, hidden] and both axes; `numbers` [N, hidden] are output rows.
    """
    spans = torch.cat([sheet.spans for sheet in sheets])
    goal = click_distribution(spans.flatten(0, 1))
    points = heads.places(tokens).unflatten(-1, (2, -1)).flatten(0, 1)
    return F.kl_div(F.log_softmax(points @ numbers.T, dim=-1), goal, reduction="batchmean")


def letters_recall(
    heads: DenseHeads, features: ImageFeatures, sheets: Sequence[ReadSheet]
) -> tuple[int, int, int]:
    """Return how many half tokens with a character are right, predict any, and hold any."""
    tokens = torch.cat(features.embeds)
    target, weight = letter_targets(sheets)
    best = heads.letters(tokens).unflatten(-1, (2, CHARACTERS)).argmax(-1)
    has_character = (target[..., 0] == 0) & (weight > 0)
    right = (target.gather(-1, best[..., None])[..., 0] > 0) & has_character
    return int(right.sum()), int(((best > 0) & (weight > 0)).sum()), int(has_character.sum())
