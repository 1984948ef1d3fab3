"""Weights that make a model write actions, in the user's action language and the tokens of its tokenizer.

    TokenChain         a Markov chain over tokens: the tokens that may follow each token
    make_token_chain   builds the chain for an action parser and a tokenizer: clicks, and an action that ends
    write_chain        changes a model's weights so that it follows the chain, whatever its prompt is

A model with random weights writes noise, which ends each episode at its first step, so that neither history
nor environments would be tested. A chain needs no training: for each token one neuron recognises its
embedding, and adds the embeddings of the tokens that may follow. Only the last token decides what follows,
so no token may occur twice in a text. There are many ways to split a text into tokens, and one is searched
for in which all tokens differ.
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
"""Most characters of a token in the search."""
MOST_TRIES = 2000
"""Most tokens that the search in one text tries."""
PLACES = 100
"""Number of clicks that are tried until the tokens of one allow a chain."""
MOST_SPACES = 6
"""Most spaces of a text that are left out in all combinations."""
CHOICES = 3
"""Most digits that may occur in the same place."""
SHARPNESS = 40.0
"""Logit of the only token that may follow, above the logits of all others."""
OTHER_LENGTH = 0.1
"""Length of the embedding of a token outside the chain, relative to one of the chain."""
END_PROBABILITY = 0.2
"""Probability that a written action ends its episode."""
ADDED_LENGTH = 4.0
"""Length of the vector that a neuron adds, relative to the vector that it is added to."""

Piece = str | tuple[int, ...]
"""A part of a text: characters that are to be split into tokens, or tokens that replace it."""


@dataclass
class TokenChain:
    """The tokens that may follow `start` and each later token. All texts end with `end`."""

    start: int  # the last token of every prompt
    end: int
    after: dict[int, list[int]] = field(default_factory=dict)
    """Token -> tokens that may follow it."""
    ending: set[int] = field(default_factory=set)
    """First tokens of the actions that end the episode."""
    _before: dict[int, str] = field(default_factory=dict)  # token -> text up to its end
    _rest: dict[int, str] = field(default_factory=dict)  # token -> text behind it

    @property
    def tokens(self) -> list[int]:
        """All tokens of the chain, including `start` and `end`."""
        followers = (token for tokens in self.after.values() for token in tokens)
        return sorted({self.start, *self.after, *followers})

    def add(self, tokens: Sequence[tuple[int, str]], *, ends: bool = False) -> None:
        """Add a text, given as its tokens with their texts. `ends` says that its action ends the episode."""
        whole = "".join(text for _, text in tokens)
        last, position = self.start, 0
        for token, text in tokens:
            if ends and last in self.after and token not in self.after[last]:
                self.ending.add(token)
                ends = False
            self._link(last, token)
            position += len(text)
            self._before.setdefault(token, whole[:position])
            self._rest.setdefault(token, whole[position:])
            last = token
        self._link(last, self.end)

    def _link(self, token: int, following: int) -> None:
        """Let `following` follow `token`."""
        listed = self.after.setdefault(token, [])
        if following not in listed:
            listed.append(following)

    def may_follow(self, token: int, before: str, rest: str, *, shared: bool) -> bool:
        """Return True if `token` may stand between the texts `before` and `rest`.

        `shared` is True as long as an earlier action has the same text.
        """
        if token in (self.start, self.end):
            return False
        if token not in self._rest:
            return True
        return self._rest[token] == rest or (shared and self._before[token] == before)

    def vary(self, digits: Mapping[str, int], text_of: Callable[[int], str]) -> None:
        """Allow other digits in the place of a digit; each digit is used in one place only."""
        free = [token for token in digits.values() if token not in self._rest]
        for token in list(self._rest):
            if text_of(token) not in digits or text_of(token) == "0":
                continue
            earlier = [before for before, followers in self.after.items() if token in followers]
            for other in free[: CHOICES - 1]:
                free.remove(other)
                self.after[other] = self.after[token]
                for before in earlier:
                    self.after[before].append(other)

    def texts(self, text_of: Callable[[int], str], most: int) -> Iterator[str]:
        """Yield up to `most` of the texts that can be written."""
        open_: list[tuple[int, str]] = [(self.start, "")]
        count = 0
        while open_ and count < most:
            token, text = open_.pop()
            for following in self.after[token]:
                if following == self.end:
                    count += 1
                    yield text
                else:
                    open_.append((following, text + text_of(following)))


def make_token_chain(
    policy: LoadedPolicy, action_parser: ActionParser, coordinates: CoordinateMap, start: int
) -> TokenChain | None:
    """Return a chain of texts that `action_parser` reads as actions, after a prompt that ends with `start`.

    Return None if the tokens do not allow one.
    """
    single = _single_tokens(policy)
    end = policy.encode_completion("")[-1]
    # With varied digits a text may be no action; then the chain is built again without them.
    for varied in (True, False):
        chain = TokenChain(start, end)
        for actions in (_clicks(coordinates), [Done()]):
            texts = (
                text
                for action in actions
                for text in _spellings(action_parser, action, coordinates)
            )
            cuts = (_cut(_pieces(policy, action_parser, text), chain, single) for text in texts)
            if cut := next(filter(None, cuts), None):
                chain.add(cut, ends=bool(chain.after))
        if not chain.after:
            return None
        if varied:
            digits = {digit: single(digit) for digit in "123456789"}
            digit_tokens = {digit: token for digit, token in digits.items() if token is not None}
            chain.vary(digit_tokens, lambda token: policy.decode([token]))
        samples = chain.texts(lambda token: policy.decode([token]), 500)
        if policy.pointing == "pointer" or all(
            _parse(action_parser, text, coordinates) for text in samples
        ):
            return chain
    return None


def _clicks(coordinates: CoordinateMap) -> Iterator[Action]:
    """Yield clicks spread over the screen; in most coordinates a digit repeats, so many are needed."""
    for place in range(1, PLACES):
        across, down = (place * share % 1 for share in (0.618034, 0.754878))  # an even spread
        yield Click(x=int(coordinates.width * across), y=int(coordinates.height * down))


def _spellings(
    action_parser: ActionParser, action: Action, coordinates: CoordinateMap
) -> Iterator[str]:
    """Yield texts that mean `action`: as the parser writes it, with other whitespace, without its thought."""
    try:
        text = action_parser.format(action, coordinates)
        parsed = action_parser.parse(text, coordinates)
    except ActionError:
        return
    lines = text.strip().split("\n")
    joined = ("\n", "\n\n", " ", "")
    spellings = [between.join(lines[first:]) for first in range(len(lines)) for between in joined]
    for spelling in dict.fromkeys([text, *spellings]):
        if _parse(action_parser, spelling, coordinates) == parsed:
            yield from (
                shorter
                for shorter in _without_spaces(spelling)
                if _parse(action_parser, shorter, coordinates) == parsed
            )


def _without_spaces(text: str) -> Iterator[str]:
    """Yield the text, and variants without some of the spaces after its commas and colons."""
    spaces = [match.start() for match in re.finditer(r"(?<=[:,]) ", text)][:MOST_SPACES]
    for choices in product((False, True), repeat=len(spaces)):
        removed = {place for place, is_removed in zip(spaces, choices, strict=True) if is_removed}
        yield "".join(letter for place, letter in enumerate(text) if place not in removed)


def _parse(action_parser: ActionParser, text: str, coordinates: CoordinateMap) -> Action | None:
    """Return the action that a text means; None if it is none."""
    try:
        return action_parser.parse(text, coordinates)
    except ActionError:
        return None


def _pieces(policy: LoadedPolicy, action_parser: ActionParser, text: str) -> list[Piece]:
    """Return the pieces of a text. For a policy with a pointer head, pointer tokens replace its points."""
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
    """Return a function: text -> the token for exactly this text, or None if none may be sampled."""
    cache: dict[str, int | None] = {}
    unsampled = policy.absent_token_ids | set(policy.end_token_ids)

    def single(text: str) -> int | None:
        if text not in cache:
            tokens = policy.encode(policy.literal.mark(text))
            is_one = len(tokens) == 1 and tokens[0] not in unsampled
            cache[text] = tokens[0] if is_one and policy.decode(tokens) == text else None
        return cache[text]

    return single


def _cut(
    pieces: Sequence[Piece], chain: TokenChain, single: Callable[[str], int | None]
) -> list[tuple[int, str]] | None:
    """Return the pieces as tokens with their texts, all tokens different; None if there is no such split."""
    whole = "".join(piece for piece in pieces if isinstance(piece, str))
    fixed: dict[int, tuple[int, ...]] = {}  # position in `whole` -> tokens that stand before it
    place = 0
    for piece in pieces:
        if isinstance(piece, str):
            place += len(piece)
        else:
            fixed[place] = piece
    tries = 0

    def search(at: int, used: list[tuple[int, str]], shared: bool) -> list[tuple[int, str]] | None:
        nonlocal tries
        tokens = {token for token, _ in used}
        if at in fixed and not tokens.intersection(fixed[at]):
            pointers = [(token, "") for token in fixed[at]]
            if not all(
                chain.may_follow(t, whole[:at], whole[at:], shared=shared) for t in fixed[at]
            ):
                return None
            used = [*used, *pointers]
            tokens |= {token for token, _ in pointers}
        if at == len(whole):
            return used
        stop = min((place for place in fixed if place > at), default=len(whole))
        for upto in range(min(at + LONGEST, stop), at, -1):
            text = whole[at:upto]
            token = single(text)
            tries += 1
            if tries > MOST_TRIES:
                return None
            if token is None or token in tokens:
                continue
            before, rest = whole[:upto], whole[upto:]
            if not chain.may_follow(token, before, rest, shared=shared):
                continue
            last = used[-1][0] if used else chain.start
            still = shared and token in chain.after.get(last, ())
            split = search(upto, [*used, (token, text)], still)
            if split is not None:
                return split
        return None

    return search(0, [], True)


def _leaving(layer: Any) -> Any:
    """Return the projection with which attention leaves a layer, or recurrence where it has that instead."""
    return layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj


@torch.no_grad()
def write_chain(model: Any, chain: TokenChain, generator: torch.Generator) -> None:
    """Change the random weights of a model, of any supported class, so that it follows the chain.

    Embeddings get random directions, output embeddings the same ones, and the last layer's MLP becomes the
    chain. Raises ValueError if it has fewer neurons than the chain has tokens.
    """
    # 1. Embeddings: random directions, at right angles for the tokens of the chain if these are few.
    rows = model.get_input_embeddings().weight
    width = rows.shape[1]
    length = SHARPNESS / width**0.5
    directions = torch.randn(rows.shape, generator=generator)
    directions /= directions.norm(dim=1, keepdim=True)
    if len(chain.tokens) <= width:
        directions[chain.tokens] = torch.linalg.qr(directions[chain.tokens].T)[0].T
    sizes = torch.full((rows.shape[0], 1), OTHER_LENGTH * length)
    sizes[chain.tokens] = length
    rows.copy_(directions * sizes)
    model.get_output_embeddings().weight.copy_(rows)

    # 2. All layers together add as much context as two layers would: a fraction of an embedding's length.
    *earlier, last = model.model.language_model.layers
    context = length / (width * (len(earlier) + 1) / 2) ** 0.5
    for linear in (
        *(_leaving(layer) for layer in (*earlier, last)),
        *(layer.mlp.down_proj for layer in earlier),
    ):
        linear.weight *= context

    # 3. The last MLP: one neuron for each token of the chain.
    mlp = last.mlp
    if len(chain.after) > mlp.gate_proj.weight.shape[0]:
        raise ValueError(f"a chain of {len(chain.after)} tokens needs as many neurons")
    for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        projection.weight.zero_()
    # A normalised vector of a token's direction has length sqrt(width): silu(s) s is about s^2 = width.
    for neuron, (token, following) in enumerate(chain.after.items()):
        mlp.gate_proj.weight[neuron] = directions[token]
        mlp.up_proj.weight[neuron] = directions[token]
        # Lowers the logit of the token with which an ending action begins.
        rarer = (
            math.log((1 - END_PROBABILITY) / END_PROBABILITY) * len(following) ** 0.5 / SHARPNESS
        )
        shares = [1 - rarer if token in chain.ending else 1.0 for token in following]
        target = torch.tensor(shares) @ directions[following]
        mlp.down_proj.weight[:, neuron] = target / target.norm() * (ADDED_LENGTH * length / width)
