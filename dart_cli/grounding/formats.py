"""How a text model is asked for a point, and how its text is read.

    AnswerFormat     prompt, reader and writer of one way of answering
    format_of        the format of `--action-parser`: a language of the action parsers, point, or an action parser of your own
    opening_of       what a model that points writes before its point
    grounding_config the configuration of the model and its prompts, checked; prompt_config, of a format
    Pointed          what a text says

The prompts of compact, uitars and point are in our words: with the page that a model was trained with it scores
higher (`--set policy.template=...`). The others are those of the families that write them (docs/families.md).
Every figure is told with its prompt.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bus.error_texts import did_you_mean
from bus.errors import ActionError, ConfigError
from dart_cli.config.families import values_of
from dart_cli.config.load import Source, config_of_model
from dart_cli.config.model_folder import BUILTIN, TOKENIZER, model_folder, model_problem, read_json
from dart_cli.config.rules.check import check_config
from dart_cli.config.schema import Config
from dart_cli.grounding.items import Point
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers import make_action_parser, point_parser
from dart_cli.language.parsers.base import ActionParser
from dart_cli.language.parsers.tools import point_of
from dart_cli.language.thoughts import reply_of
from envs.contract.actions import Action, Click, Drag, Fail

_RENAMED = {"qwen": "toolcall"}
"""Formats by the names that they had."""

GUI_ACTOR = "gui-actor"
"""The format of GUI-Actor's released models (arXiv 2506.03143), which write no numbers."""

COORDINATES = {"qwen2_vl": "thousand", "qwen2_5_vl": "resized", "qwen3_vl": "thousand"}
"""The numbers that the models of a class write, but for those with action parser compact; see policy.coordinates."""


@dataclass(frozen=True)
class Pointed:
    """What one text says."""

    point: Point | None  # pixels of the screenshot
    refused: bool = False
    problem: str = ""  # why there is no point


Reader = Callable[[str, CoordinateMap], Pointed]
Writer = Callable[[tuple[int, int], CoordinateMap], str]
"""A pixel of the screenshot -> the answer that names it. Raises ActionError."""


@dataclass(frozen=True)
class AnswerFormat:
    """One way of asking for a point and of answering."""

    name: str
    read: Reader
    write: Writer
    template: str = "{instruction}"  # around the instruction
    refusal: str = ""  # added to the template where a set has instructions that nothing answers
    system: str = ""
    part_order: str = "image_first"
    action_parser: str = (
        "uitars"  # `policy.action_parser`, which reads no text but in its own format
    )
    max_tokens: int = 32
    coordinates: str = ""  # of its family; "": those of the model's class
    opening: str = ""  # of a model that points: what it writes before; "": what `write` has there


# --- readers ---------------------------------------------------------------------------------


def read_action(action_parser: ActionParser, text: str, coordinates: CoordinateMap) -> Pointed:
    """Return the place that an action names, of a drag its beginning. `fail` refuses."""
    try:
        action = action_parser.parse(text, replace(coordinates, assumes_places=False))
    except ActionError as error:
        return Pointed(None, problem=str(error))
    if isinstance(action, Fail):
        return Pointed(None, refused=True, problem="it refuses")
    point = _place(action)
    return Pointed(point, problem="" if point else f"{action.kind} has no place")


def _place(action: Action) -> Point | None:
    if isinstance(action, Drag):
        return action.path[0]
    x, y = getattr(action, "x", None), getattr(action, "y", None)
    return None if x is None or y is None else (x, y)


_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?:px)?(?![A-Za-z0-9_%]|\.\d)"
)
"""A number by itself: no digits of a name such as x1 or point_2d, and no percentage."""
_BETWEEN = re.compile(r"[\s,;|()\[\]{}\"'=]*(?:\b[xyXY]\w{0,3}\b[\s\"'=:]*)?")
"""What may stand between the numbers of one point or box: no words, but names such as y1."""


def read_point(text: str, coordinates: CoordinateMap) -> Pointed:
    """Read two numbers as a point, four as a box, whose middle is meant; (-1, -1) refuses.

    Nothing is read in a thought, and other numbers may stand apart, such as that of a label.
    """
    try:
        groups = _groups(reply_of(text)[:2000])
    except ActionError as error:
        return Pointed(None, problem=str(error))
    places = [each for each in groups if len(each) in (2, 4)]
    if not places:
        count = sum(map(len, groups))
        return Pointed(None, problem=f"it has {count} numbers in place of 2 or 4 side by side")
    if any(each != places[0] for each in places):
        return Pointed(None, problem=f"it has {len(places)} points or boxes in place of one")
    if set(places[0]) == {-1.0}:
        return Pointed(None, refused=True, problem="it refuses")
    return _to_screen(places[0], coordinates)


def _groups(text: str) -> list[list[float]]:
    """Return the numbers of a text, those together that stand beside each other."""
    groups: list[list[float]] = []
    end = -1
    for each in _NUMBER.finditer(text):
        if end < 0 or not _BETWEEN.fullmatch(text, end, each.start()):
            groups.append([])
        groups[-1].append(float(each[0].removesuffix("px")))
        end = each.end()
    return groups


_CALL = re.compile(r"\{.*\}", re.DOTALL)


def read_call(action_parser: ActionParser, text: str, coordinates: CoordinateMap) -> Pointed:
    """Return the place of a tool call; also of one whose tags or name are missing, or that has no known action."""
    read = read_action(action_parser, text, coordinates)
    if read.point or read.refused:
        return read
    try:
        call = _CALL.search(reply_of(text)[:8000])
        if call is None:
            return read
        arguments = json.loads(call[0])["arguments"]
        if arguments.get("action") == "terminate" and arguments.get("status") == "failure":
            return Pointed(None, refused=True, problem="it refuses")
        return Pointed(coordinates.to_screen(*point_of(arguments["coordinate"])))
    except (ActionError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:  # fmt: skip
        is_told = isinstance(error, ActionError | OverflowError) or "NaN" in str(error)
        told = str(error) if is_told else read.problem
        return Pointed(None, problem=told)


def write_click(
    action_parser: ActionParser, point: tuple[int, int], coordinates: CoordinateMap
) -> str:
    """Return a click in an action language."""
    return action_parser.format(Click(x=point[0], y=point[1]), coordinates)


def write_point(point: tuple[int, int], coordinates: CoordinateMap) -> str:
    """Return what `read_point` reads."""
    x, y = coordinates.to_model(*point)
    return f"({x},{y})"


def _to_screen(numbers: list[float], coordinates: CoordinateMap) -> Pointed:
    """Of a point, or of the middle of a box."""
    x, y = (numbers[0] + numbers[-2]) / 2, (numbers[1] + numbers[-1]) / 2
    try:
        return Pointed(coordinates.to_screen(math.floor(x), math.floor(y)))
    except (ActionError, OverflowError, ValueError) as error:
        return Pointed(None, problem=str(error))


# --- formats ---------------------------------------------------------------------------------

_UITARS = """You are a GUI agent. You are given an instruction and a screenshot. Click what the instruction names.

## Output Format
Action: ...

## Action Space
click(start_box='(x1,y1)')
{refusal}
## User Instruction
{instruction}"""

_POINT = """Which element of this screenshot does the instruction name? Answer with the point to click, as \
(x,y), and with nothing else.{refusal}
Instruction: {instruction}"""

_FAMILY_OF = {
    "toolcall": "qwen2.5-vl",
    "toolcall-mobile": "qwen3-vl-mobile",
    "toolcall-mai": "mai-ui",
    "toolcall-xml": "qwen3.5",
    "pyautogui": "opencua",
    "scalecua": "scalecua",
    "glm": "glm-4.5v",
}
"""Whose prompt asks in a language; see dart_cli/config/families.py."""

_REFUSAL = "\nIf nothing on the screen is meant, terminate with failure."


def _in_language(parser_name: str, **others: Any) -> AnswerFormat:
    """Answers that are actions of an action parser."""
    action_parser = make_action_parser(parser_name)
    return AnswerFormat(
        parser_name,
        partial(read_action, action_parser),
        partial(write_click, action_parser),
        action_parser=parser_name,
        **others,
    )


def _of_family(parser_name: str) -> AnswerFormat:
    """Answers in the language of a family, asked with its prompt."""
    action_parser, name = make_action_parser(parser_name), _FAMILY_OF[parser_name]
    values = {key: value for key, (value, _) in values_of(name).items()}
    asked = values["template"] if not values["system_prompt"] else "{instruction}"
    reads_loosely = parser_name.startswith("toolcall") and parser_name != "toolcall-xml"
    return AnswerFormat(
        parser_name,
        partial(read_call if reads_loosely else read_action, action_parser),
        partial(write_click, action_parser),
        template=asked.replace("{previous}", "").replace("{instruction}", "{instruction}{refusal}"),
        refusal=_REFUSAL,
        system=values["system_prompt"],
        action_parser=parser_name,
        coordinates="" if values["coordinates"] == "resized" else values["coordinates"],
        max_tokens=256,
    )


_GUI_ACTOR = (
    "You act on a computer with pyautogui. Given a screenshot and an instruction, click what it names: "
    "pyautogui.click(<|pointer_start|><|pointer_pad|><|pointer_end|>)."
)

_FORMATS: Mapping[str, Callable[[], AnswerFormat]] = {
    "compact": lambda: _in_language("compact", max_tokens=16),
    "uitars": lambda: _in_language(
        "uitars",
        template=_UITARS,
        refusal="call_user() # nothing on the screen is meant\n",
        max_tokens=256,
    ),
    **{name: partial(_of_family, name) for name in _FAMILY_OF},
    "point": lambda: AnswerFormat(
        "point",
        read_point,
        write_point,
        template=_POINT,
        refusal=" If nothing on the screen is meant, answer (-1,-1).",
    ),
    GUI_ACTOR: lambda: AnswerFormat(
        GUI_ACTOR,
        read_point,
        write_point,
        system=_GUI_ACTOR,
        opening="<|recipient|>os\npyautogui.click(",
    ),
}


def format_of(name: str, model: str) -> AnswerFormat:
    """Return the format called `name`, else `compact` for a model that has its words as tokens.

    Raises ConfigError for an unknown one, and where none is named and the model does not show it.
    """
    if not name:
        if _writes_compact(model):
            name = "compact"
        else:
            raise ConfigError(
                f"--action-parser is needed: how {model} answers cannot be seen in its folder; there are "
                f"{', '.join(_FORMATS)}, and your own as file.py:MyParser"
            )
    name = _RENAMED.get(name, name)
    if name in _FORMATS:
        return _FORMATS[name]()
    if ":" in name:
        return _in_language(name, part_order="auto", max_tokens=256)
    raise ConfigError(
        f"--action-parser {name}: no such format{did_you_mean(name, _FORMATS)}; there are "
        f"{', '.join(_FORMATS)}, and your own as file.py:MyParser"
    )


def opening_of(answers: AnswerFormat) -> str:
    """Return what a model that points writes before its point. Raises ConfigError for a format with no place for one."""
    if answers.opening:
        return answers.opening
    action_parser = answers.action_parser if answers.name == answers.action_parser else ""
    text = answers.write((500, 500), CoordinateMap(1000, 1000, 1000, 1000))
    points = point_parser(action_parser).find_points(text) if action_parser else []
    if len(points) != 1:
        raise ConfigError(
            f"--action-parser {answers.name} has no place for a pointer; use compact, uitars, toolcall, {GUI_ACTOR}, or your "
            "own as file.py:MyParser, or leave out --set policy.pointing=pointer"
        )
    return text[: points[0].start]


def _writes_compact(model: str) -> bool:
    """Whether the words of action parser compact are tokens of the model: it was made for them."""
    held = read_json(folder_of(model), TOKENIZER).get("model", {}).get("vocab", {})
    # A list of [word, score] pairs, or a mapping from words; checked by model_problem.
    return "click(" in (held if isinstance(held, dict) else {word for word, _ in held})


def folder_of(model: str) -> Path:
    """Return the folder of a model's name."""
    return model_folder(model)


def grounding_config(
    model: str, action_parser: str, overrides: list[str], *, refusals: bool
) -> tuple[Config, AnswerFormat]:
    """Return the configuration of a model folder for grounding, with `overrides`, and its answer format.

    With `refusals` the prompt says how to refuse. Raises ConfigError.
    """
    if problem := model_problem(model):
        raise ConfigError(f"--model {problem}")
    answers = format_of(action_parser, model)
    if model in BUILTIN and answers.name != "compact":
        raise ConfigError(
            f"--action-parser must be compact, the only language of {model}, got {answers.name}"
        )
    return prompt_config(model, answers, overrides, refusals=refusals), answers


def _coordinates_of(answers: AnswerFormat, kind: str) -> str:
    """Return a language that has numbers of its own on any class: MAI-UI's and GLM's thousandths."""
    own = answers.coordinates
    return own if own == "thousandths" else COORDINATES[kind]


def prompt_config(
    model: str, answers: AnswerFormat, overrides: list[str], *, refusals: bool = False
) -> Config:
    """Return the configuration of a model folder for prompts of a format. Raises ConfigError."""
    folder = folder_of(model)
    kind = str(read_json(folder, "config.json").get("model_type"))
    template = answers.template.replace("{refusal}", answers.refusal if refusals else "")
    own = {
        "policy.action_parser": answers.action_parser,
        "policy.template": template,
        "policy.system_prompt": answers.system,
        "policy.part_order": answers.part_order,
        "policy.coordinates": "thousandths"
        if answers.action_parser == "compact"
        else _coordinates_of(answers, kind),
        "rollout.max_tokens": answers.max_tokens,
    }
    changes = [*(f"{key}={json.dumps(value)}" for key, value in own.items()), *overrides]
    config = config_of_model(Path(model), changes)
    if config.policy.pointing == "pointer" and template != answers.template.replace(
        "{refusal}", ""
    ):
        return prompt_config(model, answers, overrides)  # one that points refuses nothing
    if config.policy.pointing == "text" and answers.name == GUI_ACTOR:
        raise ConfigError(
            f"--action-parser {GUI_ACTOR} has no numbers; add --set policy.pointing=pointer"
        )
    check_config(config, Source(folder, tuple(changes)), "rollout")
    return config
