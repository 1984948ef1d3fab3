"""What a miniature writes: actions of the user's own action language, in the tokens of its own tokenizer.

    Writing      a chain over tokens: after each, which may follow
    writing_of   the chain of an action parser and a tokenizer: clicks, and an action that ends the episode
    write_into   weights of a model that follows the chain, whatever its prompt is

A model of random weights writes noise, which ends each episode at its first step: neither history nor
environments would be rehearsed. A chain needs no training: one neuron for each token recognises its embedding
and gives those of its successors. So that the last token alone says what follows, no token stands twice in a
text: of the many ways to cut a text into tokens one is searched for in which none does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from bus.errors import ActionError
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers.base import ActionParser, PointParser
from dart_cli.language.pointer_text import split_text
from dart_cli.policy.loader import LoadedPolicy
from envs.contract.actions import Action, Click, Done

LONGEST = 24
"""Characters of a token that is tried."""
TRIED = 2000
"""Tokens that the search in one text tries at most."""
PLACES = 100
"""Clicks that are tried, until the tokens of one allow a chain."""
MOST_SPACES = 6
"""Spaces of a text that are left out in every combination."""
CHOICES = 3
"""Most digits that may stand in one place."""
SHARPNESS = 40.0
"""Logit of a token that alone may follow, above those of all others."""
FAINT = 0.1
"""Length of the embedding of a token that is not in the chain, beside one that is."""
ENDED = 0.2
"""Probability that an action ends its episode, of those that are written."""
RECALLED = 4.0
"""What a neuron adds, in lengths of the vector that it is added to."""

Piece = str | tuple[int, ...]
"""A part of a text: characters to be cut into tokens, or tokens that stand for it."""


@dataclass
class Writing:
    """After `start` and each token that follows it, which tokens may follow; texts end with `end`."""

    start: int  # the last token of every prompt
    end: int
    after: dict[int, list[int]] = field(default_factory=dict)
    ending: set[int] = field(
        default_factory=set
    )  # with which an action that ends the episode begins
    _before: dict[int, str] = field(default_factory=dict)  # of a token, the text up to its end
    _rest: dict[int, str] = field(default_factory=dict)  # and the text behind it

    @property
    def tokens(self) -> list[int]:
        """All of them, `start` and `end` too."""
        return sorted({self.start, *self.after, *(u for each in self.after.values() for u in each)})

    def add(self, tokens: Sequence[tuple[int, str]], *, ends: bool = False) -> None:
        """Let a text be written, whose tokens are given with their texts; `ends`: it ends the episode."""
        whole = "".join(text for _, text in tokens)
        last, done = self.start, 0
        for token, text in tokens:
            if ends and last in self.after and token not in self.after[last]:
                self.ending.add(token)
                ends = False
            self._link(last, token)
            done += len(text)
            self._before.setdefault(token, whole[:done])
            self._rest.setdefault(token, whole[done:])
            last = token
        self._link(last, self.end)

    def _link(self, token: int, following: int) -> None:
        listed = self.after.setdefault(token, [])
        if following not in listed:
            listed.append(following)

    def may_follow(self, token: int, before: str, rest: str, *, shared: bool) -> bool:
        """Whether `token` may stand between these texts; `shared` while the text is that of an earlier one."""
        if token in (self.start, self.end):
            return False
        if token not in self._rest:
            return True
        return self._rest[token] == rest or (shared and self._before[token] == before)

    def vary(self, digits: Mapping[str, int], text_of: Callable[[int], str]) -> None:
        """Let other digits stand where a digit does, each in one place alone."""
        free = [token for token in digits.values() if token not in self._rest]
        for token in list(self._rest):
            if text_of(token) not in digits or text_of(token) == "0":
                continue
            earlier = [each for each, listed in self.after.items() if token in listed]
            for other in free[: CHOICES - 1]:
                free.remove(other)
                self.after[other] = self.after[token]
                for each in earlier:
                    self.after[each].append(other)

    def texts(self, text_of: Callable[[int], str], most: int) -> Iterator[str]:
        """Up to `most` of the texts that can be written."""
        open_: list[tuple[int, str]] = [(self.start, "")]
        found = 0
        while open_ and found < most:
            token, text = open_.pop()
            for each in self.after[token]:
                if each == self.end:
                    found += 1
                    yield text
                else:
                    open_.append((each, text + text_of(each)))


def writing_of(
    policy: LoadedPolicy, action_parser: ActionParser, coordinates: CoordinateMap, start: int
) -> Writing | None:
    """Return the chain of texts that `action_parser` reads as actions, behind a prompt that ends with `start`.

    None where the tokens do not allow one.
    """
    single = _single_tokens(policy)
    end = policy.encode_completion("")[-1]
    for varied in (True, False):  # other digits may give what is no action
        writing = Writing(start, end)
        for actions in (_clicks(coordinates), [Done()]):
            texts = (
                text for each in actions for text in _spellings(action_parser, each, coordinates)
            )
            cuts = (_cut(_pieces(policy, action_parser, text), writing, single) for text in texts)
            if cut := next(filter(None, cuts), None):
                writing.add(cut, ends=bool(writing.after))
        if not writing.after:
            return None
        if varied:
            found = {digit: single(digit) for digit in "123456789"}
            known = {digit: token for digit, token in found.items() if token is not None}
            writing.vary(known, lambda token: policy.decode([token]))
        written = writing.texts(lambda token: policy.decode([token]), 500)
        if policy.pointing == "pointer" or all(
            _meant(action_parser, text, coordinates) for text in written
        ):
            return writing
    return None


def _clicks(coordinates: CoordinateMap) -> Iterator[Action]:
    """Clicks all over the screen: of few numbers the digits are all different."""
    for place in range(1, PLACES):
        across, down = (place * share % 1 for share in (0.618034, 0.754878))  # an even spread
        yield Click(x=int(coordinates.width * across), y=int(coordinates.height * down))


def _spellings(
    action_parser: ActionParser, action: Action, coordinates: CoordinateMap
) -> Iterator[str]:
    """Texts that mean an action: as the action parser writes it, with other space between its lines, without a thought."""
    try:
        text = action_parser.format(action, coordinates)
        meant = action_parser.parse(text, coordinates)
    except ActionError:
        return
    lines = text.strip().split("\n")
    joined = ("\n", "\n\n", " ", "")
    spellings = [between.join(lines[first:]) for first in range(len(lines)) for between in joined]
    for spelt in dict.fromkeys([text, *spellings]):
        if _meant(action_parser, spelt, coordinates) == meant:
            yield from (
                each
                for each in _closed_up(spelt)
                if _meant(action_parser, each, coordinates) == meant
            )


def _closed_up(text: str) -> Iterator[str]:
    """Yield a text, and it without some of the spaces behind its commas and colons."""
    spaces = [found.start() for found in re.finditer(r"(?<=[:,]) ", text)][:MOST_SPACES]
    for left_out in product((False, True), repeat=len(spaces)):
        gone = {place for place, out in zip(spaces, left_out, strict=True) if out}
        yield "".join(each for place, each in enumerate(text) if place not in gone)


def _meant(action_parser: ActionParser, text: str, coordinates: CoordinateMap) -> Action | None:
    try:
        return action_parser.parse(text, coordinates)
    except ActionError:
        return None


def _pieces(policy: LoadedPolicy, action_parser: ActionParser, text: str) -> list[Piece]:
    """Return a text; of one that points, pointers in the place of its points."""
    if (
        policy.pointer is None
        or policy.pointing != "pointer"
        or not isinstance(action_parser, PointParser)
    ):
        return [text]
    around, points = split_text(action_parser, text)
    pieces: list[Piece] = [around[0]]
    for piece in around[1 : len(points) + 1]:
        pieces += [policy.pointer.triple, piece]
    return pieces


def _single_tokens(policy: LoadedPolicy) -> Callable[[str], int | None]:
    """Return the token that is exactly a text; None where there is none that may be sampled."""
    known: dict[str, int | None] = {}
    unsampled = policy.absent_token_ids | set(policy.end_token_ids)

    def single(text: str) -> int | None:
        if text not in known:
            found = policy.encode(policy.literal.mark(text))
            is_one = len(found) == 1 and found[0] not in unsampled
            known[text] = found[0] if is_one and policy.decode(found) == text else None
        return known[text]

    return single


def _cut(
    pieces: Sequence[Piece], writing: Writing, single: Callable[[str], int | None]
) -> list[tuple[int, str]] | None:
    """Return the pieces as tokens with their texts, in which none stands twice; None where they cannot be cut so."""
    whole = "".join(piece for piece in pieces if isinstance(piece, str))
    fixed: dict[int, tuple[int, ...]] = {}  # tokens that stand before this character
    place = 0
    for piece in pieces:
        if isinstance(piece, str):
            place += len(piece)
        else:
            fixed[place] = piece
    tried = 0

    def search(at: int, used: list[tuple[int, str]], shared: bool) -> list[tuple[int, str]] | None:
        nonlocal tried
        tokens = {token for token, _ in used}
        if at in fixed and not tokens.intersection(fixed[at]):
            given = [(token, "") for token in fixed[at]]
            if not all(
                writing.may_follow(t, whole[:at], whole[at:], shared=shared) for t in fixed[at]
            ):
                return None
            used = [*used, *given]
            tokens |= {token for token, _ in given}
        if at == len(whole):
            return used
        stop = min((each for each in fixed if each > at), default=len(whole))
        for upto in range(min(at + LONGEST, stop), at, -1):
            text = whole[at:upto]
            token = single(text)
            tried += 1
            if tried > TRIED:
                return None
            if token is None or token in tokens:
                continue
            before, rest = whole[:upto], whole[upto:]
            if not writing.may_follow(token, before, rest, shared=shared):
                continue
            last = used[-1][0] if used else writing.start
            still = shared and token in writing.after.get(last, ())
            found = search(upto, [*used, (token, text)], still)
            if found is not None:
                return found
        return None

    return search(0, [], True)


@torch.no_grad()
def write_into(model: Any, writing: Writing, generator: torch.Generator) -> None:
    """Make a model of random weights, of any supported class, follow the chain. In place.

    Embeddings get random directions, the output embeddings the same ones; the last layer's MLP is the chain.
    Raises ValueError where it has fewer neurons than the chain has tokens.
    """
    rows = model.get_input_embeddings().weight
    width = rows.shape[1]
    length = SHARPNESS / width**0.5
    directions = torch.randn(rows.shape, generator=generator)
    directions /= directions.norm(dim=1, keepdim=True)
    if len(writing.tokens) <= width:  # at right angles, so that none is taken for another
        directions[writing.tokens] = torch.linalg.qr(directions[writing.tokens].T)[0].T
    sizes = torch.full((rows.shape[0], 1), FAINT * length)
    sizes[writing.tokens] = length
    rows.copy_(directions * sizes)
    model.get_output_embeddings().weight.copy_(rows)
    *earlier, last = model.model.language_model.layers
    context = length / (width * (len(earlier) + 1) / 2) ** 0.5  # what all layers add, as two would
    for linear in (
        *(each.self_attn.o_proj for each in (*earlier, last)),
        *(each.mlp.down_proj for each in earlier),
    ):
        linear.weight *= context  # a fraction of an embedding's length
    mlp = last.mlp
    if len(writing.after) > mlp.gate_proj.weight.shape[0]:
        raise ValueError(f"a chain of {len(writing.after)} tokens needs as many neurons")
    for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        projection.weight.zero_()
    # A normalised vector of a token's direction has length sqrt(width): silu(s) s is about s^2 = width.
    for neuron, (token, following) in enumerate(writing.after.items()):
        mlp.gate_proj.weight[neuron] = directions[token]
        mlp.up_proj.weight[neuron] = directions[token]
        rarer = math.log((1 - ENDED) / ENDED) * len(following) ** 0.5 / SHARPNESS
        shares = [1 - rarer if each in writing.ending else 1.0 for each in following]
        wanted = torch.tensor(shares) @ directions[following]
        mlp.down_proj.weight[:, neuron] = wanted / wanted.norm() * (RECALLED * length / width)
