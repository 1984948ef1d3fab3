"""Prompts of the families that load, with past turns: the text that the family's own agent builds.

Each agent below builds the messages of its public code (docs/families.md names it) for the same episode; both
go through the chat template of the class as it is published: Qwen2-VL's and Qwen2.5-VL's as transformers' own tests have
it (tests/models/qwen2_vl/test_processing_qwen2_vl.py), Qwen3-VL's as its checkpoints have it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bus.messages import Turn
from dart_cli.config.families import FAMILIES, PROMPTS, values_of
from dart_cli.config.schema import PolicyConfig
from dart_cli.language.history import history_of, previous_of
from dart_cli.language.parsers import make_action_parser
from dart_cli.language.parsers.base import summary_of
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import make_renderer
from scripts.small_models import build

TEMPLATES = Path(__file__).parent / "templates"
TASK = "Turn on the dark mode in {settings} & save"
Messages = list[dict[str, Any]]

CALL = '<tool_call>\n{{"name": "computer_use", "arguments": {{"action": "left_click", "coordinate": [{0}, 5]}}}}\n</tool_call>'
WRITES = {
    "uitars": "Thought: I click {0}.\nAction: click(start_box='({0},5)')",
    "toolcall": "Action: Click {0}.\n" + CALL,
    "toolcall-mobile": "Thought: Go on.\nAction: Click {0}.\n" + CALL.replace("computer", "mobile"),
    "toolcall-mai": "<thinking>\nClick {0}.\n</thinking>\n"
    + CALL.replace("computer", "mobile").replace(": ", ":").replace(", ", ","),
    "scalecua": "<think>\nIt is there.\n</think>\n<operation>\nClick {0}.\n</operation>\n<action>\nclick(x={0}, y=5)\n</action>",
}
"""A completion of each language."""

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [said(text)]}


def system(name: str) -> dict[str, Any]:
    text = (PROMPTS / f"{name}.system.txt").read_bytes().decode()
    return {"role": "system", "content": [said(text)]}


# --- the agents ----------------------------------------------------------------------------------


def windowed(
    name: str, *, image_first: bool, begins: str = "\n"
) -> Callable[[list[str]], Messages]:
    """OSWorld's for Qwen2.5-VL and Qwen3-VL, EvoCUA's in style S2, GUI-Owl-1.5's: the last four steps as turns."""

    def messages(responses: list[str]) -> Messages:
        actions = [each.split("Action:")[1].split("<tool_call>")[0].strip() for each in responses]
        start = max(0, len(responses) - 4)
        previous = "\n".join(f"Step {i + 1}: {actions[i]}" for i in range(start)) or "None"
        prompt = said(
            f"{begins}Please generate the next move according to the UI screenshot, instruction and "
            f"previous actions.\n\nInstruction: {TASK}\n\nPrevious actions:\n{previous}"
        )
        first = (IMAGE, prompt) if image_first else (prompt, IMAGE)
        built = [system(name)]
        for number, response in enumerate(responses[start:]):
            built += [user(*first) if number == 0 else user(IMAGE), assistant(response)]
        return [*built, user(IMAGE) if responses else user(*first)]

    return messages


def ui_tars(name: str) -> Callable[[list[str]], Messages]:
    """OSWorld's uitars15_v1: all responses, with box tokens, and the newest five screens."""

    def messages(responses: list[str]) -> Messages:
        page = (PROMPTS / f"{name}.template.txt").read_bytes().decode()
        built = [system("ui-tars"), user(said(page.replace("{instruction}", TASK)))]
        for number, response in enumerate(responses):
            if number + 5 > len(responses):
                built.append(user(IMAGE))
            boxed = re.sub(r"_box='(\(\d+,\d+\))'", r"_box='<|box_start|>\1<|box_end|>'", response)
            built.append(assistant(boxed))
        return [*built, user(IMAGE)]

    return messages


def mai_ui(responses: list[str]) -> Messages:
    """MAIUINaivigationAgent with history_n 3: all responses, the newest two of their screens."""
    built = [system("mai-ui"), user(said(TASK))]
    for number, response in enumerate(responses):
        if number >= max(0, len(responses) - 2):
            built.append(user(IMAGE))
        built.append(assistant(response))
    return [*built, user(IMAGE)]


def scalecua(responses: list[str]) -> Messages:
    """ScaleCUA's native agent: one message, past operations as text."""
    operations = [
        re.findall(r"<operation>\s*(.*?)\s*</operation>", each, re.DOTALL)[0] for each in responses
    ]
    history = "\n".join(f"Step {i + 1}: {each}" for i, each in enumerate(operations)) or None
    asked = (
        "Please generate the next move according to the UI screenshot, the task and previous operations."
        f"\n\nTask:\n{TASK}\n\nPrevious operations:\n{history}\n"
    )
    return [system("scalecua"), user(IMAGE, said(asked))]


def qwen3_mobile(responses: list[str]) -> Messages:
    """Qwen3-VL's cookbook mobile_agent.ipynb: one message, past actions as text."""
    history = ""
    for number, response in enumerate(responses):
        action = response.split("Action: ")[1].split("\n")[0]
        history += f"Step {number + 1}: {action}; "
    asked = (
        f"The user query: {TASK}.\nTask progress (You have done the following operation on the current "
        f"device): {history}.\n"
    )
    return [system("qwen3-vl-mobile"), user(said(asked), IMAGE)]


AGENTS: dict[str, Callable[[list[str]], Messages]] = {
    "ui-tars": ui_tars("ui-tars"),
    "ui-tars-1.5": ui_tars("ui-tars-1.5"),
    "qwen2.5-vl": windowed("qwen2.5-vl", image_first=True),
    "qwen3-vl": windowed("qwen3-vl", image_first=True),
    "qwen3-vl-mobile": qwen3_mobile,
    "gui-owl-1.5": windowed("gui-owl-1.5", image_first=False, begins=""),
    "gui-owl-1.5-mobile": windowed("gui-owl-1.5-mobile", image_first=False, begins=""),
    "mai-ui": mai_ui,
    "evocua": windowed("evocua", image_first=True),
    "scalecua": scalecua,
}


# --- ours ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedPolicy]:
    """A tiny model of each class, with the class's published template."""
    place = tmp_path_factory.mktemp("models")
    loaded = {}
    for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        policy = load_policy(build(kind, place / kind), weights=False)
        template = "qwen3_vl" if kind == "qwen3_vl" else "qwen2_5_vl"
        policy.tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(
            encoding="utf-8"
        )
        loaded[kind] = policy
    return loaded


def screen() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (112, 112)).save(buffer, "PNG")
    return buffer.getvalue()


def ours(policy: LoadedPolicy, name: str, responses: list[str]) -> str:
    """As an episode plays: what history keeps of each turn, and the steps before them."""
    values = {key: value for key, (value, _) in values_of(name).items()}
    config = PolicyConfig(family=name, **values)
    action_parser, history, told = (
        make_action_parser(config.action_parser),
        history_of(config),
        previous_of(config),
    )
    turns: list[Turn] = []
    for response in responses:
        turn = Turn(text=action_parser.as_history(response), screenshot=screen())
        turns = history.visible([*turns, turn])
    actions = [summary_of(action_parser, each) for each in responses]
    previous = told.text(actions[: len(actions) - len(turns)]) if told else ""
    prompt = make_renderer(policy, config).render(TASK, turns, screen(), previous=previous)
    text = policy.tokenizer.decode(prompt.token_ids)
    return re.sub(r"(?:<\|image_pad\|>)+", "<|image_pad|>", text)


def test_every_family_that_loads_is_compared() -> None:
    loaded = {name for name, its in FAMILIES.items() if its.is_loaded}
    assert set(AGENTS) == loaded


@pytest.mark.parametrize("past", [0, 2, 7])
@pytest.mark.parametrize("name", AGENTS)
def test_a_prompt_is_what_the_familys_own_agent_builds(
    name: str, past: int, policies: dict[str, LoadedPolicy]
) -> None:
    its = FAMILIES[name]
    policy = policies[its.model_types[0]]
    responses = [WRITES[its.action_parser].format(number) for number in range(past)]
    expected = policy.tokenizer.apply_chat_template(
        AGENTS[name](responses), tokenize=False, add_generation_prompt=True
    )
    assert ours(policy, name, responses) == expected
