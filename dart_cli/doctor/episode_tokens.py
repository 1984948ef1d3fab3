"""How many tokens an episode is for the trainer and for an engine, by the history that prompts keep.

EpisodeForm     screens, texts and history of an episode
EpisodeTokens   its chains, and what an engine with a prefix cache reads anew
episode_tokens  the one from the other

`slide` drops a screen at each step once there are `images`, so that each prompt differs from the one
before behind that screen; `evict` drops several at once (docs/policy.md). A chain is steps whose prompts
extend one another: the trainer computes its tokens once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EpisodeForm:
    """Sizes in tokens; `most` 0 is `slide`."""

    steps: int
    screen: int
    completion: int  # of a typical step, and as its text in later prompts
    header: int  # system prompt, template, instruction
    images: int  # policy.history_images
    most: int  # policy.history_images_most with `evict`
    turns: int  # policy.history_turns

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can be, without its last completion."""
        shown = max(self.images, self.most)
        return (
            self.header
            + min(shown, self.steps) * self.screen
            + self.longest_turns * self.completion
        )

    @property
    def longest_turns(self) -> int:
        """Past turns in it."""
        turns = self.turns + (self.most - self.images if self.most else 0)
        return min(turns, self.steps - 1)


@dataclass(frozen=True)
class EpisodeTokens:
    """Of one episode."""

    chains: tuple[tuple[int, int], ...]  # tokens and steps of each
    alone: int  # tokens of all steps' sequences, each alone
    read: int  # prompt tokens that a prefix cache does not have
    pairs: float  # of a token that is read and one that it sees
    screens_read: int  # among these tokens

    @property
    def tokens(self) -> int:
        """Of all chains."""
        return sum(tokens for tokens, _ in self.chains)


def episode_tokens(form: EpisodeForm) -> EpisodeTokens:
    """Play the prompts of an episode through, without any text."""
    chains: list[tuple[int, int]] = []
    alone = read = screens = 0
    pairs = 0.0
    first_image = first_turn = 1  # of the prompt, counted from 1
    for step in range(1, form.steps + 1):
        shown, turn = _window(form, step, first_image, first_turn)
        length = form.header + (step - turn) * form.completion + (step - shown + 1) * form.screen
        whole = length + form.completion
        extends = step > 1 and (shown, turn) == (first_image, first_turn)
        if extends:
            cached, seen = chains[-1][0], 1
            chains[-1] = (whole, chains[-1][1] + 1)
        else:
            kept = first_image - first_turn if turn == first_turn else 0  # turns of text alone
            cached = form.header + kept * form.completion if step > 1 else 0
            seen = step - shown + 1
            chains.append((whole, 1))
        first_image, first_turn = shown, turn
        alone += whole
        read += length - cached
        pairs += (length**2 - cached**2) / 2
        screens += seen
    return EpisodeTokens(tuple(chains), alone, read, pairs, screens)


def _window(form: EpisodeForm, step: int, image: int, turn: int) -> tuple[int, int]:
    """The first screen and the first turn of a step's prompt, after those of the step before."""
    if not form.most:
        return max(1, step - form.images + 1), max(1, step - form.turns)
    if step - image + 1 <= form.most:
        return image, turn
    return max(1, step - form.images + 1), max(1, step - form.turns)
