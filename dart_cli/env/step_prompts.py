"""The prompts of an episode: what each shows of the screen and of earlier steps, and how its answer is read.

ActionSpec       reads texts as actions, and says what prompts show of earlier steps
action_spec_of   returns the ActionSpec of a configuration
StepPrompts      makes the requests of one episode, step by step

An episode that a teacher plays has two StepPrompts: the student's and the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bus.errors import ActionError
from bus.messages import ActRequest, Completion, Sampling, Turn
from dart_cli.config.schema import Config
from dart_cli.language.coordinates import (
    CoordinateMap,
    make_coordinate_map,
    pointer_after,
    resize_of,
)
from dart_cli.language.history import History, Previous, history_of, previous_of
from dart_cli.language.parsers import make_action_parser
from dart_cli.language.parsers.base import ActionParser, PointParser, summary_of
from dart_cli.language.parsers.several import read_actions, write_actions
from dart_cli.language.pointer_text import split_text
from envs.contract.actions import Action
from envs.contract.base import Observation
from envs.contract.blobs import content_hash
from envs.contract.observed_texts import prompt_text

OBSERVE_CHARS = 8000
"""Most characters of each text beside a screenshot in a prompt; a text that was cut contains a note of it."""


@dataclass(frozen=True)
class ActionSpec:
    """The action parser, coordinates and history of a run, which are the same for all of its episodes."""

    action_parser: ActionParser
    history: History
    # (width, height) of a screenshot -> its coordinate map
    coordinate_map_of: Callable[[int, int], CoordinateMap]
    # How the prompt describes earlier steps; None where its template does not show them.
    previous: Previous | None = None

    def read(
        self, text: str, screen: Observation, pointer: tuple[int, int] | None
    ) -> tuple[list[Action], str]:
        """Return (actions, "") for the text of a completion, or ([], why it is malformed).

        `pointer` is the pixel of the pointer on the screen, None where it is unknown.
        """
        try:
            coordinates = self.coordinate_map_of(screen.width, screen.height)
            at = replace(coordinates, pointer=pointer)
            return read_actions(self.action_parser, text, at), ""
        except ActionError as error:
            return [], str(error) or "no action"

    def write(self, actions: Sequence[Action], size: tuple[int, int], thought: str = "") -> str:
        """Return the completion of actions on a screen of `size`. Raises ActionError if it cannot be written."""
        coordinates = self.coordinate_map_of(*size)
        return write_actions(self.action_parser, actions, coordinates, thought)


def action_spec_of(config: Config) -> ActionSpec:
    """Return the action parser, coordinates and history that a configuration asks for."""
    policy, resize = config.policy, resize_of(config)
    return ActionSpec(
        action_parser=make_action_parser(policy.action_parser, policy.max_actions),
        history=history_of(policy),
        coordinate_map_of=lambda width, height: make_coordinate_map(
            policy.coordinates, width, height, resize
        ),
        previous=previous_of(policy),
    )


class StepPrompts:
    """The requests of one episode, step by step."""

    def __init__(self, action_spec: ActionSpec) -> None:
        self.pointer: tuple[int, int] | None = None  # pixel; None until an action has moved it
        self._action_spec = action_spec
        self._turns: list[Turn] = []
        self._actions: list[str] = []  # a summary of each step's action, where prompts show it
        self._hashes: list[str] = []  # hashes of the turns' screenshots, each computed once
        self._screen_hash = ""
        self._observed_text = ""  # texts beside the screen that the policy is asked about

    def request(
        self,
        trajectory_id: str,
        step: int,
        instruction: str,
        screen: Observation,
        sampling: Sampling,
    ) -> ActRequest:
        """Return the request for the action on `screen`, with what the prompt shows of earlier steps."""
        self._screen_hash = content_hash(screen.screenshot)
        self._observed_text = self._text_beside(screen)
        return ActRequest(
            trajectory_id=trajectory_id,
            step=step,
            instruction=instruction,
            turns=self._turns,
            previous=self._previous(),
            screenshot=screen.screenshot,
            image_hashes=[*self._hashes, self._screen_hash],
            width=screen.width,
            height=screen.height,
            observed_text=self._observed_text,
            sampling=sampling,
        )

    def read(self, text: str, screen: Observation) -> tuple[list[Action], str]:
        """Return (actions, "") for the text of a completion, or ([], why it is malformed)."""
        return self._action_spec.read(text, screen, self.pointer)

    def move_pointer(self, action: Action) -> None:
        """Note that `action` was performed, which may have moved the mouse pointer."""
        self.pointer = pointer_after(action, self.pointer)

    def remember(self, completion: Completion, screen: Observation) -> None:
        """Add a step to the turns and descriptions that later prompts show."""
        history = self._action_spec.history
        if self._action_spec.previous is not None:
            self._actions.append(summary_of(self._action_spec.action_parser, completion.text))
        text = self._action_spec.action_parser.as_history(completion.text)
        token_ids = completion.sampled.token_ids
        if history.evicts and token_ids:
            # Only the sampled tokens themselves extend the prompt that they were sampled for.
            text = completion.text
        elif text != completion.text and not self._differs_in_points_only(text, completion):
            token_ids = []  # the history shows another text than the sampled one
        turn = Turn(
            text=text,
            screenshot=screen.screenshot,
            token_ids=token_ids,
            observed_text=self._observed_text,
        )
        # A screenshot that the history hides now stays hidden, so it need not be kept.
        self._turns = history.visible([*self._turns, turn])
        image_count = sum(turn.screenshot is not None for turn in self._turns)
        hashes = [*self._hashes, self._screen_hash]
        self._hashes = hashes[len(hashes) - image_count :]

    def _previous(self) -> str:
        """Return the description of the steps that are older than the turns in the prompt."""
        previous = self._action_spec.previous
        if previous is None:
            return ""
        return previous.text(self._actions[: len(self._actions) - len(self._turns)])

    def _text_beside(self, screen: Observation) -> str:
        """Return the texts that came with the screenshot, as the prompt shows them."""
        if not screen.texts:
            return ""
        spec = self._action_spec

        def to_model(x: int, y: int) -> tuple[int, int]:
            return spec.coordinate_map_of(screen.width, screen.height).to_model(x, y)

        return prompt_text(screen.texts, OBSERVE_CHARS, to_model)

    def _differs_in_points_only(self, text: str, completion: Completion) -> bool:
        """Return True if the policy used its pointing head, and `text` differs only in written points."""
        action_parser = self._action_spec.action_parser
        if not completion.sampled.patches or not isinstance(action_parser, PointParser):
            return False
        return split_text(action_parser, text)[0] == split_text(action_parser, completion.text)[0]
