"""Items of grounding sets as examples: prompts as at inference, and the answers that the model learns.

Example               one prompt and its answer
TextAnswers           answers with numbers, in an answer format
PointerAnswers        the same answers with a pointer in place of the numbers
TruthAnswers          answers for a verifier: True or False
Examples              items with their prompts and answers, checked before anything is trained
ItemPrompts           the configuration of the prompts, and the format of the answers
item_prompts          returns the ItemPrompts of a configuration, as `dart eval grounding` asks
answers_of            returns the answers that the model learns
demonstration_config  returns the configuration of the prompts of demonstrations
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from bus.errors import ActionError, ConfigError, EngineError, ModelError, UserError
from dart_cli.algo.pointing import Shares
from dart_cli.config.families import FAMILIES
from dart_cli.config.schema import Config
from dart_cli.config.values import to_toml
from dart_cli.grounding.formats import AnswerFormat, grounding_config
from dart_cli.grounding.items import Box, Item, bounds_of, pixel_in
from dart_cli.grounding.scorers import verifier_config
from dart_cli.language.coordinates import CoordinateMap, make_coordinate_map
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.prompt import PromptRenderer, RenderedPrompt, make_renderer
from dart_cli.policy.verifier import ANSWERS, VerifierSpec, answer_tokens


@dataclass(frozen=True)
class Example:
    """One prompt and its answer."""

    prompt: RenderedPrompt
    answer: list[int]  # [A], token ids, the end token last
    box: Shares | None = None  # the target of the pointer in the answer


class Answers(Protocol):
    """An interface: answers that the model learns."""

    def of(self, item: Item) -> tuple[list[int], Shares | None]:
        """Return the token ids of an answer [A], and the box of their pointer.

        Raises ActionError if there is none.
        """
        ...


class TextAnswers:
    """Answers with numbers, which `dart eval grounding` reads in the same format."""

    def __init__(self, policy: LoadedPolicy, config: Config, answers: AnswerFormat) -> None:
        self._policy = policy
        self._config = config.policy
        self._answers = answers
        self._thought = make_renderer(policy, config.policy).closed_thought()

    def text(self, item: Item) -> str:
        """Return the text of an answer: the pixel of the region that is nearest to its visible middle."""
        assert item.region is not None
        pixel = pixel_in(item.region, item.size)
        if pixel is None:
            raise ActionError("no pixel is in its region")
        return self._thought + self._answers.write(pixel, self.map_of(item))

    def map_of(self, item: Item) -> CoordinateMap:
        """Return the map between the model's coordinates and the item's pixels."""
        config = self._config
        return make_coordinate_map(config.coordinates, *item.size, self._policy.images.screens)

    def of(self, item: Item) -> tuple[list[int], Shares | None]:
        """Return the token ids of an answer [A], and no box. Raises ActionError if there is none."""
        return self._policy.encode_completion(self.text(item)), None


class PointerAnswers:
    """Answers with a pointer in place of the numbers."""

    def __init__(self, policy: LoadedPolicy, config: Config, answers: AnswerFormat) -> None:
        points = make_renderer(policy, config.policy).points
        assert points is not None
        self._points = points
        self._end = policy.encode_completion("")
        self._texts = TextAnswers(policy, config, answers)

    def of(self, item: Item) -> tuple[list[int], Shares | None]:
        """Return the token ids of an answer [A], and the box of its pointer, in shares of the screen.

        Raises ActionError if the text does not have exactly one point.
        """
        text = self._texts.text(item)
        read = self._points.read(text)
        if len(read.points) != 1:
            raise ActionError(
                f"its action parser finds {len(read.points)} points in the answer {text[:60]!r} in place of one"
            )
        box, (wide, high) = visible_box(item), item.size
        shares = box.x0 / wide, box.y0 / high, box.x1 / wide, box.y1 / high
        return [*read.token_ids, *self._end], shares


class TruthAnswers:
    """Answers for a verifier: True if the mark is right. The item of a right mark has a region."""

    def __init__(self, policy: LoadedPolicy, config: Config) -> None:
        thought = make_renderer(policy, config.policy).closed_thought()
        true, false = (policy.encode_completion(thought + answer) for answer in ANSWERS)
        self._tokens = {True: true, False: false}

    def of(self, item: Item) -> tuple[list[int], Shares | None]:
        """Return the token ids of True or False [A], and no box."""
        return self._tokens[item.region is not None], None


class Examples:
    """Items with their prompts and answers."""

    def __init__(
        self, policy: LoadedPolicy, config: Config, items: Sequence[Item], answers: Answers
    ) -> None:
        """Raise UserError for an item that the model cannot be trained on."""
        self.items = items
        self._policy = policy
        self._answers = answers
        self._renderer: PromptRenderer = make_renderer(policy, config.policy)
        self._never = policy.absent_token_ids
        # Every answer can be written, and the longest prompts fit.
        for item in items:
            self._answer(item)
        for item in self._longest():
            self._prompt(item)

    @property
    def group_names(self) -> list[str]:
        """The screenshot of each item [N]; its items stay together in an epoch."""
        return [str(item.image) for item in self.items]

    def of(self, index: int) -> Example:
        """Return the example of an item, by number."""
        item = self.items[index]
        answer, box = self._answer(item)
        return Example(self._prompt(item), answer, box)

    def _answer(self, item: Item) -> tuple[list[int], Shares | None]:
        """Return an answer and the box of its pointer. Raises UserError if it cannot be written."""
        try:
            answer, box = self._answers.of(item)
        except ActionError as error:
            raise UserError(f"{item.id}: no answer can be written: {error}") from None
        if never := self._never.intersection(answer):
            token = self._policy.tokenizer.convert_ids_to_tokens(min(never))
            raise UserError(
                f"{item.id}: its answer has the token {token!r}, which this model never samples; choose "
                "another tune.action_parser"
            )
        return answer, box

    def _prompt(self, item: Item) -> RenderedPrompt:
        """Return the prompt of an item. Raises UserError if it is longer than the model's positions."""
        try:
            prompt = self._renderer.render(item.instruction, [], item.image.read_bytes())
        except OSError as error:
            raise UserError(
                f"{item.id}: {item.image}: {error.strerror}; copy the set again"
            ) from None
        except (EngineError, ModelError) as error:
            raise UserError(f"{item.id}: {error}") from None
        longest = self._policy.max_positions
        answer, _ = self._answer(item)
        if len(prompt.token_ids) + len(answer) > longest:
            raise UserError(
                f"{item.id}: prompt and answer have {len(prompt.token_ids)} + {len(answer)} tokens, more than "
                f"the model's {longest}; lower max_pixels in its preprocessor_config.json"
            )
        return prompt

    def _longest(self) -> list[Item]:
        """Return the item with the largest screenshot, and the one with the longest instruction."""

        def pixels(item: Item) -> int:
            wide, high = self._policy.images.resized(*item.size)
            return wide * high

        by_text = max(self.items, key=lambda item: len(item.instruction))
        return [max(self.items, key=pixels), by_text]


def visible_box(item: Item) -> Box:
    """Return the part of an item's region that is on its screenshot, as a box; for a polygon, its bounds."""
    assert item.region is not None
    bounds, (wide, high) = bounds_of(item.region), item.size
    return Box(
        max(0.0, bounds.x0),
        max(0.0, bounds.y0),
        min(float(wide), bounds.x1),
        min(float(high), bounds.y1),
    )


# --- how items are asked ----------------------------------------------------------------------

AnswerKind = Literal["pointer", "text", "verifier", "actions", "completions"]
"""What the answers are: a pointer, numbers, True and False, actions of demonstrations, or sampled
completions."""


@dataclass(frozen=True)
class ItemPrompts:
    """How items are asked and answered."""

    config: Config  # with the [policy] of the prompts
    answers: AnswerFormat
    kind: AnswerKind


def item_prompts(config: Config, verifier: VerifierSpec | None) -> ItemPrompts:
    """Return how items are asked; with `verifier`, how a verifier is asked.

    Its [policy] has the prompts of the answer format; keys that the file sets are kept. Raises ConfigError.
    """
    tune, policy = config.tune, config.policy
    own = policy.model_fields_set - {"action_parser", "pointing"}
    changes = [f"policy.{name}={to_toml(getattr(policy, name))}" for name in sorted(own)]
    changes.append(f'rollout.device="{config.train.device}"')
    points = policy.pointing == "pointer"
    if verifier is not None:
        if points:
            raise ConfigError(
                'policy.pointing = "pointer" with rows for a verifier, which answers True or False; leave '
                "it out"
            )
        prompt_config, answers = verifier_config(config.model.path, verifier, changes)
        kind: AnswerKind = "verifier"
    else:
        sets_action_parser = "action_parser" in policy.model_fields_set or policy.family in FAMILIES
        action_parser = tune.action_parser or (policy.action_parser if sets_action_parser else "")
        changes += ['policy.pointing="pointer"'] if points else []
        try:
            prompt_config, answers = grounding_config(
                config.model.path, action_parser, changes, refusals=False
            )
        except UserError as error:
            raise ConfigError(str(error).replace("--action-parser", "tune.action_parser")) from None
        kind = "pointer" if points else "text"
    return ItemPrompts(config.model_copy(update={"policy": prompt_config.policy}), answers, kind)


def demonstration_config(config: Config) -> Config:
    """Return the configuration of the prompts of demonstrations: `config` itself.

    Raises ConfigError for a pointer.
    """
    if config.policy.pointing == "pointer":
        raise ConfigError(
            'policy.pointing = "pointer" with demonstrations, which have no boxes: learn numbers, with '
            '"text", or places, from a grounding set'
        )
    return config


def answers_of(prompts: ItemPrompts, policy: LoadedPolicy) -> Answers:
    """Return the answers that the model learns. Raises ModelError for a verifier without tokens for them."""
    if prompts.kind == "verifier":
        answer_tokens(policy)
        return TruthAnswers(policy, prompts.config)
    if prompts.kind == "pointer":
        return PointerAnswers(policy, prompts.config, prompts.answers)
    return TextAnswers(policy, prompts.config, prompts.answers)
