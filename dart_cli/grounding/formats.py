"""How a text model is asked for a point, and how its text is read.

    AnswerFormat      the prompt, the reader and the writer of one way of answering
    AnswerReading     what was read in a text: a point, a refusal, or a problem
    format_of         the format of `--action-parser`: `point`, or the name of an action parser
    opening_of        what a model that points writes before its point
    grounding_config  the checked configuration of a model and its prompts, and its answer format
    prompt_config     the configuration of a model with the prompts of a format

The prompts of compact, uitars and point are in our words. With the prompt that it was trained with, a model
scores higher (`--set policy.template=...`). The other prompts are those of the families that use them
(docs/families.md). Every figure is reported with its prompt.
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
"""Older names of formats."""

GUI_ACTOR = "gui-actor"
"""The format of GUI-Actor's released models (arXiv 2506.03143), which write no numbers."""

COORDINATES = {
    "qwen2_vl": "thousand",
    "qwen2_5_vl": "resized",
    "qwen3_vl": "thousand",
    "qwen3_vl_moe": "thousand",
    "qwen3_5": "thousand",
    "qwen3_5_moe": "thousand",
}
"""The coordinates of each class of models, unless their action parser is compact; see policy.coordinates."""


@dataclass(frozen=True)
class AnswerReading:
    """What was read in one text."""

    point: Point | None  # pixels of the screenshot
    refused: bool = False  # it says that nothing on the screen is meant
    problem: str = ""  # why there is no point


Reader = Callable[[str, CoordinateMap], AnswerReading]
Writer = Callable[[tuple[int, int], CoordinateMap], str]
"""Takes a pixel of the screenshot, and returns the answer that names it. Raises ActionError."""


@dataclass(frozen=True)
class AnswerFormat:
    """One way of asking for a point and of answering."""

    name: str
    read: Reader
    write: Writer
    template: str = "{instruction}"  # around the instruction
    refusal: str = ""  # added to the template if a set has instructions to refuse
    system: str = ""
    part_order: str = "image_first"
    action_parser: str = "uitars"  # `policy.action_parser`; it reads text only in its own format
    max_tokens: int = 32
    coordinates: str = ""  # of its family; "" for the coordinates of the model's class
    # What a model that points writes before its point; "" for what `write` has there.
    opening: str = ""


# --- readers ---------------------------------------------------------------------------------


def read_action(
    action_parser: ActionParser, text: str, coordinates: CoordinateMap
) -> AnswerReading:
    """Read the place that an action names; for a drag, its beginning. `fail` refuses."""
    try:
        action = action_parser.parse(text, replace(coordinates, assumes_places=False))
    except ActionError as error:
        return AnswerReading(None, problem=str(error))
    if isinstance(action, Fail):
        return AnswerReading(None, refused=True, problem="it refuses")
    point = _place(action)
    return AnswerReading(point, problem="" if point else f"{action.kind} has no place")


def _place(action: Action) -> Point | None:
    """Return the place at which an action acts; for a drag, its beginning; None without one."""
    if isinstance(action, Drag):
        return action.path[0]
    x, y = getattr(action, "x", None), getattr(action, "y", None)
    return None if x is None or y is None else (x, y)


_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?:px)?(?![A-Za-z0-9_%]|\.\d)"
)
"""Matches a separate number: no digits of a name such as x1 or point_2d, and no percentage."""
_BETWEEN = re.compile(r"[\s,;|()\[\]{}\"'=]*(?:\b[xyXY]\w{0,3}\b[\s\"'=:]*)?")
"""Matches what may stand between the numbers of one point or box: no words except names such as y1."""


def read_point(text: str, coordinates: CoordinateMap) -> AnswerReading:
    """Read two numbers as a point, and four as a box, whose middle is taken; (-1, -1) refuses.

    Thoughts are skipped. Other numbers, such as a label's, may stand elsewhere in the text.
    """
    try:
        groups = _groups(reply_of(text)[:2000])
    except ActionError as error:
        return AnswerReading(None, problem=str(error))
    places = [numbers for numbers in groups if len(numbers) in (2, 4)]
    if not places:
        count = sum(map(len, groups))
        return AnswerReading(
            None, problem=f"it has {count} numbers in place of 2 or 4 side by side"
        )
    if any(numbers != places[0] for numbers in places):
        return AnswerReading(None, problem=f"it has {len(places)} points or boxes in place of one")
    if set(places[0]) == {-1.0}:
        return AnswerReading(None, refused=True, problem="it refuses")
    return _to_screen(places[0], coordinates)


def _groups(text: str) -> list[list[float]]:
    """Return the numbers of a text, in groups of numbers that stand side by side."""
    groups: list[list[float]] = []
    end = -1
    for match in _NUMBER.finditer(text):
        if end < 0 or not _BETWEEN.fullmatch(text, end, match.start()):
            groups.append([])
        groups[-1].append(float(match[0].removesuffix("px")))
        end = match.end()
    return groups


_CALL = re.compile(r"\{.*\}", re.DOTALL)


def read_call(action_parser: ActionParser, text: str, coordinates: CoordinateMap) -> AnswerReading:
    """Read the place of a tool call, even if its tags or name are missing, or its action is unknown."""
    reading = read_action(action_parser, text, coordinates)
    if reading.point or reading.refused:
        return reading
    try:
        call = _CALL.search(reply_of(text)[:8000])
        if call is None:
            return reading
        arguments = json.loads(call[0])["arguments"]
        if arguments.get("action") == "terminate" and arguments.get("status") == "failure":
            return AnswerReading(None, refused=True, problem="it refuses")
        return AnswerReading(coordinates.to_screen(*point_of(arguments["coordinate"])))
    except (ActionError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:  # fmt: skip
        is_clear = isinstance(error, ActionError | OverflowError) or "NaN" in str(error)
        return AnswerReading(None, problem=str(error) if is_clear else reading.problem)


def write_click(
    action_parser: ActionParser, point: tuple[int, int], coordinates: CoordinateMap
) -> str:
    """Return a click in an action language."""
    return action_parser.format(Click(x=point[0], y=point[1]), coordinates)


def write_point(point: tuple[int, int], coordinates: CoordinateMap) -> str:
    """Return a point as `read_point` reads it."""
    x, y = coordinates.to_model(*point)
    return f"({x},{y})"


def _to_screen(numbers: list[float], coordinates: CoordinateMap) -> AnswerReading:
    """Return the pixel of a point, or of the middle of a box."""
    x, y = (numbers[0] + numbers[-2]) / 2, (numbers[1] + numbers[-1]) / 2
    try:
        return AnswerReading(coordinates.to_screen(math.floor(x), math.floor(y)))
    except (ActionError, OverflowError, ValueError) as error:
        return AnswerReading(None, problem=str(error))


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
    "toolcall-fara": "fara-1.5",
    "toolcall-xml": "qwen3.5",
    "pyautogui": "opencua",
    "scalecua": "scalecua",
    "glm": "glm-4.5v",
    "venus": "ui-venus-2",
    "venus-web": "ui-venus-1.5",
    "venus-mobile": "ui-venus-1.5-mobile",
    "holo": "holo-3.1",
}
"""The family whose prompt is used with an action parser; see dart_cli/config/families.py."""

_REFUSAL = "\nIf nothing on the screen is meant, terminate with failure."


def _in_language(parser_name: str, **others: Any) -> AnswerFormat:
    """Return a format whose answers are actions in the language of an action parser."""
    action_parser = make_action_parser(parser_name)
    return AnswerFormat(
        parser_name,
        partial(read_action, action_parser),
        partial(write_click, action_parser),
        action_parser=parser_name,
        **others,
    )


def _of_family(parser_name: str) -> AnswerFormat:
    """Return a format with the language and the prompt of a family."""
    action_parser, name = make_action_parser(parser_name), _FAMILY_OF[parser_name]
    values = {key: value for key, (value, _) in values_of(name).items()}
    template, system = values["template"], values["system_prompt"]
    if len(system) > len(template):  # it has the calls, and may have the instruction
        template = "{refusal}" if "{instruction}" in system else "{instruction}"
    reads_loosely = parser_name.startswith("toolcall") and parser_name != "toolcall-xml"
    return AnswerFormat(
        parser_name,
        partial(read_call if reads_loosely else read_action, action_parser),
        partial(write_click, action_parser),
        template=template.replace("{previous}", "").replace(
            "{instruction}", "{instruction}{refusal}"
        ),
        refusal=_REFUSAL,
        system=system,
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
    """Return the format called `name`; without a name, `compact` for a model that has its words as tokens.

    Raises ConfigError for an unknown name, and if there is no name and the model does not show its format.
    """
    if not name:
        if _writes_compact(model):
            name = "compact"
        else:
            raise ConfigError(
                f"--action-parser is needed, since the folder of {model} does not show how it answers; there are "
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
    """Return what a model that points writes before its point.

    Raises ConfigError for a format without points.
    """
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
    """Return True if words of the action parser compact are tokens of the model."""
    vocabulary = read_json(folder_of(model), TOKENIZER).get("model", {}).get("vocab", {})
    # This is a mapping from words, or a list of [word, score] pairs.
    if isinstance(vocabulary, dict):
        return "click(" in vocabulary
    return any(word == "click(" for word, _ in vocabulary)


def folder_of(model: str) -> Path:
    """Return the folder of a model."""
    return model_folder(model)


def grounding_config(
    model: str, action_parser: str, overrides: list[str], *, refusals: bool
) -> tuple[Config, AnswerFormat]:
    """Return the configuration of a model folder for grounding, with `overrides`, and its answer format.

    With `refusals`, the prompt explains how to refuse. Raises ConfigError.
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
    """Return the format's coordinates if they are thousandths (MAI-UI, GLM), else the model class's."""
    own = answers.coordinates
    return own if own == "thousandths" else COORDINATES[kind]


def prompt_config(
    model: str, answers: AnswerFormat, overrides: list[str], *, refusals: bool = False
) -> Config:
    """Return the configuration of a model folder with the prompts of a format. Raises ConfigError."""
    folder = folder_of(model)
    kind = str(read_json(folder, "config.json").get("model_type"))
    template = answers.template.replace("{refusal}", answers.refusal if refusals else "")
    own = {
        "policy.action_parser": answers.action_parser,
        "policy.template": template,
        "policy.system_prompt": answers.system,
        "policy.part_order": answers.part_order,
        "policy.thinking": "off",
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
        return prompt_config(model, answers, overrides)  # a model that points cannot refuse
    if config.policy.pointing == "text" and answers.name == GUI_ACTOR:
        raise ConfigError(
            f"--action-parser {GUI_ACTOR} has no numbers; add --set policy.pointing=pointer"
        )
    check_config(config, Source(folder, tuple(changes)), "rollout")
    return config
