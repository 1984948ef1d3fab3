"""Weights that make a model write actions, in the user's action language and the tokens of its tokenizer.

    TokenChain         a Markov chain over tokens: the tokens that may follow each token
    make_token_chain   builds the chain for an action parser and a tokenizer: clicks, and an action that ends
    write_chain        changes a model's weights so that it follows the chain, whatever its prompt is

A model with random weights writes noise, which ends each episode at its first step, so that neither history
nor environments would be tested. A chain needs no training: for each token one neuron recognises its
embedding, and adds the embeddings of the tokens that may follow. Only the last token decides what follows,
so no token may occur twice in a text: spellings.py finds such texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers.base import ActionParser
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.smoke_test.spellings import Step, distinct_steps, read, spellings_of
from envs.contract.actions import Action, Click, Done

PLACES = 100
"""Number of places on the screen of which clicks are taken."""
CLICKS = 6
"""Number of clicks that are tried until the tokens of one allow a chain."""
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


@dataclass
class TokenChain:
    """The tokens that may follow `start` and each later token. All texts end with `end`."""

    start: int  # the last token of every prompt
    end: int
    after: dict[int, list[int]] = field(default_factory=dict)
    """Token -> tokens that may follow it."""
    ending: set[int] = field(default_factory=set)
    """First tokens of the actions that end the episode."""

    @property
    def tokens(self) -> list[int]:
        """All tokens of the chain, including `start` and `end`."""
        followers = (token for tokens in self.after.values() for token in tokens)
        return sorted({self.start, *self.after, *followers})

    def add(self, tokens: Iterable[int], *, ends: bool = False) -> None:
        """Add a text, given as its tokens. `ends` says that its action ends the episode."""
        last = self.start
        for token in tokens:
            if ends and last in self.after and token not in self.after[last]:
                self.ending.add(token)
                ends = False
            self._link(last, token)
            last = token
        self._link(last, self.end)

    def _link(self, token: int, following: int) -> None:
        """Let `following` follow `token`."""
        listed = self.after.setdefault(token, [])
        if following not in listed:
            listed.append(following)

    def vary(self, digits: Mapping[str, int], text_of: Callable[[int], str]) -> None:
        """Allow other digits in the place of a digit; each digit is used in one place only."""
        tokens = list(self.after)
        free = [token for token in digits.values() if token not in tokens]
        for token in tokens:
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
    pointer = policy.pointer.triple if policy.pointer and policy.pointing == "pointer" else ()

    def search(actions: Iterable[Action], earlier: Sequence[Step]) -> list[Step] | None:
        """Return the tokens of a text of one of the actions, which may share tokens with another text."""
        for action in actions:
            for spellings in spellings_of(action_parser, action, coordinates, pointer):
                steps = distinct_steps(spellings.steps(single), earlier, (start, end))
                if steps is not None and (
                    pointer
                    or read(action_parser, "".join(step.text for step in steps), coordinates)
                    == spellings.action
                ):
                    return steps
        return None

    click = search(_clicks(coordinates), ())
    ending = search([Done()], click or ())
    if click is None and ending is None:
        return None
    # With varied digits a text may be no action; then the chain is built again without them.
    for varied in (True, False):
        chain = TokenChain(start, end)
        for steps in filter(None, (click, ending)):
            chain.add((step.token for step in steps), ends=bool(chain.after))
        if varied:
            digits = {digit: single(digit) for digit in "123456789"}
            digit_tokens = {digit: token for digit, token in digits.items() if token is not None}
            chain.vary(digit_tokens, lambda token: policy.decode([token]))
        samples = chain.texts(lambda token: policy.decode([token]), 500)
        if pointer or all(read(action_parser, text, coordinates) for text in samples):
            return chain
    return None


def _clicks(coordinates: CoordinateMap) -> list[Action]:
    """Return clicks spread over the screen, of PLACES those in whose numbers the fewest digits repeat."""
    clicks = []
    for place in range(1, PLACES):
        across, down = (place * share % 1 for share in (0.618034, 0.754878))  # an even spread
        x, y = int(coordinates.width * across), int(coordinates.height * down)
        digits = "".join(map(str, coordinates.to_model(x, y)))
        clicks.append((len(digits) - len(set(digits)), place, Click(x=x, y=y)))
    return [click for _, _, click in sorted(clicks, key=lambda each: each[:2])[:CLICKS]]


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


def _leaving(layer: Any) -> Any:
    """Return the projection with which attention leaves a layer, or recurrence where it has that instead."""
    return layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj


def _mlps(mlp: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the weights of gate, up and down of a layer's MLP; of a mixture, of each expert, the shared one last."""
    if not hasattr(mlp, "experts"):
        return [(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)]
    stacked = zip(mlp.experts.gate_up_proj, mlp.experts.down_proj, strict=True)
    mlps = [(*gate_up.chunk(2), down) for gate_up, down in stacked]
    return mlps + (_mlps(mlp.shared_expert) if hasattr(mlp, "shared_expert") else [])


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
    for weight in (
        *(_leaving(layer).weight for layer in (*earlier, last)),
        *(down for layer in earlier for _, _, down in _mlps(layer.mlp)),
    ):
        weight *= context

    # 3. The last MLP: one neuron for each token of the chain. All experts of a mixture are this MLP.
    mlps = _mlps(last.mlp)
    for weight in (weight for mlp in mlps for weight in mlp):
        weight.zero_()
    for gate, up, down in mlps[
        : last.mlp.experts.num_experts if hasattr(last.mlp, "experts") else 1
    ]:
        _write_neurons(chain, directions, gate, up, down, ADDED_LENGTH * length / width)


def _write_neurons(
    chain: TokenChain,
    directions: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    added: float,
) -> None:
    """Let an MLP of zeros add what follows each token; `directions` are the embeddings' and `added` the length."""
    if len(chain.after) > gate.shape[0]:
        raise ValueError(f"a chain of {len(chain.after)} tokens needs as many neurons")
    # A normalised vector of a token's direction has length sqrt(width): silu(s) s is about s^2 = width.
    for neuron, (token, following) in enumerate(chain.after.items()):
        gate[neuron] = directions[token]
        up[neuron] = directions[token]
        # Lowers the logit of the token with which an ending action begins.
        rarer = (
            math.log((1 - END_PROBABILITY) / END_PROBABILITY) * len(following) ** 0.5 / SHARPNESS
        )
        shares = [1 - rarer if token in chain.ending else 1.0 for token in following]
        target = torch.tensor(shares) @ directions[following]
        down[:, neuron] = target / target.norm() * added
