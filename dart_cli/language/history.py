"""The history in a prompt: a bounded number of past turns, of their screenshots and of the texts beside them.

History           chooses the past turns that the next prompt shows
history_of        makes the History of a configuration
Previous          writes the steps that a prompt no longer shows as lines of text
previous_of       makes the Previous of a configuration
ScreenTexts       the texts around screens in a prompt
screen_texts_of   returns the ScreenTexts of a configuration
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bus.messages import Turn
from dart_cli.config.families import FAMILIES
from dart_cli.config.schema import PolicyConfig


@dataclass(frozen=True)
class History:
    """Chooses the past that a prompt shows: the last `turns` turns, with the newest screenshots and texts.

    `images` counts the current screenshot, which belongs to no past turn, so at most `images - 1` past
    screenshots are shown, and likewise `texts - 1` texts beside screenshots. The paper's setting is images 5,
    turns 35 (arXiv 2509.23866).

    With `images_most` 0 this holds for every prompt, and the window slides. Otherwise it holds after an
    eviction: nothing is dropped until a prompt would show more than `images_most` screenshots, so that each
    prompt until then extends the one before.
    """

    images: int
    turns: int
    texts: int = 1
    images_most: int = 0

    def __post_init__(self) -> None:
        if self.images < 1 or self.turns < 0 or self.texts < 1:
            raise ValueError(f"history needs images >= 1, turns >= 0 and texts >= 1, got {self}")
        if self.images_most and self.images_most <= self.images:
            raise ValueError(f"history needs images_most > images, or 0, got {self}")

    @property
    def evicts(self) -> bool:
        """Whether old screenshots are evicted together, and prompts extend one another in between."""
        return self.images_most > 0

    def visible(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns that go into the next prompt, oldest first.

        `turns` is either the whole past, or the result for the previous prompt with the turn since; both give
        the same result. With evictions, a turn without a screenshot must have lost it in an earlier call.
        """
        if not self.evicts:
            return self._newest(turns)
        visible: list[Turn] = []
        screenshots = 1  # the current one
        for turn in turns:
            visible.append(turn)
            screenshots += turn.screenshot is not None
            if screenshots > self.images_most:
                visible = self._newest(visible)
                screenshots = 1 + sum(turn.screenshot is not None for turn in visible)
        return visible

    def _newest(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the last turns, without the screenshots and texts that are too old."""
        newest = turns[max(0, len(turns) - self.turns) :]
        return [self._fade(turn, len(newest) - place) for place, turn in enumerate(newest)]

    def _fade(self, turn: Turn, age: int) -> Turn:
        """Return a turn without the screenshot or text that is too old; the newest turn has `age` 1."""
        lost: dict[str, object] = {"screenshot": None} if age >= self.images else {}
        if age >= self.texts and turn.observed_text:
            lost["observed_text"] = ""
        return turn.model_copy(update=lost) if lost else turn


HISTORY_TEXTS = 1
"""The number of screens whose texts (`env.observe`) are in a prompt: the current one alone. An accessibility
tree may have 8000 characters, more than the screenshot beside it has tokens, and it repeats what has not
changed."""


def history_of(policy: PolicyConfig) -> History:
    """Return the history of a configuration whose [policy] has been checked (config/rules/policy.py)."""
    return History(
        images=policy.history_images,
        turns=policy.history_turns,
        texts=HISTORY_TEXTS,
        images_most=policy.history_images_most,
    )


PREVIOUS = "{previous}"
"""The place in `policy.template` for the steps whose turns are no longer shown."""


@dataclass(frozen=True)
class Previous:
    """Writes earlier steps as a family of models is used to them.

    `line` is written for each step; it has {step}, counted from 1, or {index}, counted from 0, and {action}.
    `none` stands for no steps.
    """

    line: str = "Step {step}: {action}\n"
    none: str = "None"

    def text(self, actions: Sequence[str]) -> str:
        """Return the lines of actions [N], oldest first, without a newline at the end; `none` without any."""
        if not actions:
            return self.none
        lines = [
            self.line.replace("{step}", str(index + 1))
            .replace("{index}", str(index))
            .replace("{action}", action)
            for index, action in enumerate(actions)
        ]
        return "".join(lines).removesuffix("\n")


def previous_of(policy: PolicyConfig) -> Previous | None:
    """Return the Previous of a configuration; None if its template does not show earlier steps."""
    if PREVIOUS not in policy.template:
        return None
    family = FAMILIES.get(policy.family)
    return Previous(family.previous_line, family.previous_none) if family else Previous()


SCREEN = "{screen}"
"""The place of the screenshot in the texts around it."""


@dataclass(frozen=True)
class ScreenTexts:
    """What prompts of a family of models write around their screens, but for the screen beside the instruction.

    `newest` is around the present screen, `past` around an earlier one. `dropped` is the whole message in
    place of an earlier screen that is no longer shown: None for no message, "" for an empty one.
    """

    newest: str = SCREEN
    past: str = SCREEN
    dropped: str | None = None


def screen_texts_of(policy: PolicyConfig) -> ScreenTexts:
    """Return the texts around screens that the family of a configuration is used to."""
    family = FAMILIES.get(policy.family)
    if family is None:
        return ScreenTexts()
    newest = family.later_screen
    return ScreenTexts(newest, family.past_screen or newest, family.dropped_screen)
