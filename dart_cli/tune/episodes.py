"""Episodes that were played elsewhere, as prompts with actions in the language of `policy.action_parser`.

EPISODES         the file of a folder that has such episodes
read_episodes    reads the episodes of a folder (Demonstration, with steps: DemonstratedStep)
ActionExamples   the learned steps: the prompt that a rollout would show, and the action as the answer

A line of FOLDER/episodes.jsonl is an episode: {"instruction": TEXT, "steps": [{"image": PATH, "action":
{"kind": "click", "x": 84, "y": 42}, "thought": TEXT, "learned": true}]}. Paths of pictures are relative to
FOLDER. An action is written as in envs/contract/actions.py, in pixels of their picture. "more_actions" is a list
of actions that were done after it without another picture, which need `policy.max_actions`. A step with
"learned": false was wrong: it is only shown in the history of later steps. scripts/foreign_rows writes this format from
the data of other projects.

The history is what a policy would have seen: thought and action of earlier steps in the same language, and as
many turns and screenshots as [policy] keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from PIL import Image, UnidentifiedImageError
from pydantic import Field, ValidationError

from bus.errors import ActionError, EngineError, ModelError, UserError
from bus.messages import Turn
from dart_cli.config.schema import MOST_ACTIONS, Config
from dart_cli.language.coordinates import make_coordinate_map, pointer_after
from dart_cli.language.history import history_of, previous_of
from dart_cli.language.parsers import make_action_parser
from dart_cli.language.parsers.base import summary_of
from dart_cli.language.parsers.several import write_actions
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.prompt import RenderedPrompt, make_renderer
from dart_cli.runtime.work_folder import StoredModel
from dart_cli.tune.examples import Example
from envs.contract.actions import Action
from envs.contract.screenshots import BROKEN, seen_size
from envs.tools.textfiles import read_text, why

EPISODES = "episodes.jsonl"


@dataclass(frozen=True)
class DemonstratedStep:
    """One screenshot and what was done there."""

    screenshot: Path
    size: tuple[int, int]  # width and height, pixels
    actions: Sequence[Action]  # those of its answer, in order; usually one
    thought: str = ""
    learned: bool = True  # False: it was wrong, and is only shown in the history of later steps


@dataclass(frozen=True)
class Demonstration:
    """One episode."""

    id: str  # FILE[INDEX] of its row, from 0
    instruction: str
    steps: list[DemonstratedStep]


class StepRow(StoredModel):
    """A step of an episode, as it is stored."""

    image: str
    action: Action
    more_actions: list[Action] = Field(default=[], max_length=MOST_ACTIONS - 1)
    thought: str = ""
    learned: bool = True


class EpisodeRow(StoredModel):
    """An episode, as it is stored: one line of the file."""

    instruction: str = Field(min_length=1)
    steps: list[StepRow] = Field(min_length=1)


def read_episodes(folder: Path) -> list[Demonstration]:
    """Return the episodes of a folder. Raises UserError for a malformed row, and names its place."""
    path = folder / EPISODES
    try:
        lines = read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} {why(error, 'copy it again')}") from None
    episodes = []
    for index, line in enumerate(lines):
        place = f"{path}[{index}]"
        if not line.strip():
            continue
        try:
            row = EpisodeRow.model_validate_json(line)
            steps = [
                DemonstratedStep(
                    path, size, (step.action, *step.more_actions), step.thought, step.learned
                )
                for step in row.steps
                for path, size in [picture_of(folder, step.image)]
            ]
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{place}: {at or 'the row'}: {first['msg']}; correct the file"
            ) from None
        except ValueError as error:
            raise UserError(f"{place}: {error}; correct the file") from None
        episodes.append(Demonstration(place, row.instruction, steps))
    return episodes


def picture_of(home: Path, name: str) -> tuple[Path, tuple[int, int]]:
    """Return the path of a picture below `home`, and its size.

    Raises ValueError with what is wrong with it.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r:.60} leads out of the set's folder")
    if not (home / path).is_file():
        raise ValueError(f"there is no picture {name}")
    try:
        with Image.open(home / path) as image:
            return home / path, seen_size(image)
    except (UnidentifiedImageError, *BROKEN) as error:
        raise ValueError(f"{name} is no picture that can be read: {error}") from None


@dataclass(frozen=True)
class _Place:
    """One step of a demonstration, by number."""

    demonstration: Demonstration
    step: int


class ActionExamples:
    """The learned steps of some demonstrations, as examples."""

    def __init__(
        self, policy: LoadedPolicy, config: Config, demonstrations: Sequence[Demonstration]
    ) -> None:
        """Raise UserError for a step that the model cannot be trained on."""
        self._policy = policy
        self._config = config.policy
        self._action_parser = make_action_parser(
            config.policy.action_parser, config.policy.max_actions
        )
        self._history = history_of(config.policy)
        self._renderer = make_renderer(policy, config.policy)
        self._places = [
            _Place(demonstration, number)
            for demonstration in demonstrations
            for number, step in enumerate(demonstration.steps)
            if step.learned
        ]
        # Every answer can be written, and the longest prompts fit.
        for demonstration in demonstrations:
            for number in range(len(demonstration.steps)):
                self._answer(_Place(demonstration, number))
        for place in self._longest():
            self._example(place)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def group_names(self) -> list[str]:
        """The demonstration of each step [N]; its steps stay together in an epoch."""
        return [place.demonstration.id for place in self._places]

    def of(self, index: int) -> Example:
        """Return the example of a step, by number."""
        return self._example(self._places[index])

    def _example(self, place: _Place) -> Example:
        """Return the example of a step. Raises UserError if it is longer than the model's positions."""
        answer, prompt = self._answer(place), self._prompt(place)
        longest = self._policy.max_positions
        if len(prompt.token_ids) + len(answer) > longest:
            raise UserError(
                f"{_place_text(place)}: prompt and action have {len(prompt.token_ids)} + {len(answer)} tokens, more "
                f"than the model's {longest}; show less of the past, or lower "
                "max_pixels in the model's preprocessor_config.json"
            )
        return Example(prompt, answer)

    def _answer(self, place: _Place) -> list[int]:
        """Return the token ids of a step's action [A]. Raises UserError if it cannot be written."""
        try:
            text = self._text(place.demonstration.steps, place.step)
        except ActionError as error:
            raise UserError(
                f"{_place_text(place)}: policy.action_parser = {self._config.action_parser} cannot write it: {error}"
            ) from None
        answer = self._policy.encode_completion(text)
        if never := self._policy.absent_token_ids.intersection(answer):
            token = self._policy.tokenizer.convert_ids_to_tokens(min(never))
            raise UserError(
                f"{_place_text(place)}: its action has the token {token!r}, which this model never samples; choose "
                "another policy.action_parser"
            )
        return answer

    def _text(self, steps: Sequence[DemonstratedStep], number: int) -> str:
        """Return the thought and the action of a step in the action language. Raises ActionError."""
        config, step, pointer = self._config, steps[number], None
        for action in (action for before in steps[:number] for action in before.actions):
            pointer = pointer_after(action, pointer)
        coordinates = make_coordinate_map(
            config.coordinates, *step.size, self._policy.images.screens
        )
        # A prompt that ends within a thought leaves the action parser no place for it.
        thought = self._renderer.closed_thought(step.thought)
        at = replace(coordinates, pointer=pointer)
        return thought + write_actions(
            self._action_parser, step.actions, at, "" if thought else step.thought
        )

    def _prompt(self, place: _Place) -> RenderedPrompt:
        """Return the prompt of a step, with its history as [policy] shows it. Raises UserError."""
        steps, config = place.demonstration.steps, self._config
        first = 0 if self._history.evicts else max(0, place.step - config.history_turns)
        try:
            turns = [
                Turn(
                    text=self._text(steps, number),
                    screenshot=step.screenshot.read_bytes()
                    if self._history.evicts or place.step - number < config.history_images
                    else None,
                )
                for number, step in enumerate(steps[first : place.step], start=first)
            ]
            visible = self._history.visible(
                [
                    turn.model_copy(update={"text": self._action_parser.as_history(turn.text)})
                    for turn in turns
                ]
            )
            screenshot = steps[place.step].screenshot.read_bytes()
            previous = previous_of(config)
            if previous is None:
                return self._renderer.render(place.demonstration.instruction, visible, screenshot)
            # The steps whose turns are not visible are summed up in the template.
            actions = [
                summary_of(self._action_parser, self._text(steps, number))
                for number in range(place.step - len(visible))
            ]
            return self._renderer.render(
                place.demonstration.instruction,
                visible,
                screenshot,
                previous=previous.text(actions),
            )
        except OSError as error:
            raise UserError(f"{_place_text(place)}: {error}; copy the files again") from None
        except (EngineError, ModelError) as error:
            raise UserError(f"{_place_text(place)}: {error}") from None

    def _longest(self) -> list[_Place]:
        """Return the step with the most pixels in its prompt, and the one with the longest instruction."""

        def pixels(place: _Place) -> int:
            steps = place.demonstration.steps[: place.step + 1][-self._config.history_images :]
            return sum(wide * high for wide, high in (step.size for step in steps))

        by_text = max(self._places, key=lambda place: len(place.demonstration.instruction))
        return [max(self._places, key=pixels), by_text]


def _place_text(place: _Place) -> str:
    return f"{place.demonstration.id} step {place.step}"
