"""Prompts of the families that load, with past turns: the text that the family's own agent builds.

Each agent below builds the messages of its public code (docs/families.md names it) for the same episode; both
go through the chat template of the class as it is published: Qwen2-VL's and Qwen2.5-VL's as transformers' own tests have
it (tests/models/qwen2_vl/test_processing_qwen2_vl.py), Qwen3-VL's as its checkpoints have it. Those of Qwen3.5 and
Qwen3.8 follow their rules. A prompt does not depend on the layers of a model, so the small model of these two is a
Qwen3-VL, whose screens have as many tokens, with the tokens that Qwen3.5's tokenizer has beside Qwen3-VL's.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bus.errors import ModelError
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
    "toolcall-xml": "Action: Click {0}.\n<tool_call>\n<function=computer_use>\n<parameter=action>\nleft_click\n"
    "</parameter>\n<parameter=coordinate>\n[{0}, 5]\n</parameter>\n</function>\n</tool_call>",
    "toolcall-fara": "I click {0}.\n" + CALL,
    "holo": 'I click {0}.\n</think>\n\n{{"note": null, "thought": "It is there.", "tool_call": '
    '{{"tool_name": "click_desktop", "element": "", "x": {0}, "y": 5}}}}',
    "venus": "I click {0}.\n</think>\n\n<action>Click(box=({0}, 5))</action>",
    **dict.fromkeys(
        ("venus-web", "venus-mobile"),
        "<think>I click {0}.</think>\n<action>Click(box=({0},5))</action>\n<conclusion>I do.</conclusion>",
    ),
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


def system(name: str, **values: str) -> dict[str, Any]:
    text = (PROMPTS / f"{name}.system.txt").read_bytes().decode()
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", value)
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


def qwen_xml(name: str) -> Callable[[list[str]], Messages]:
    """OSWorld's for Qwen3.5 and later: later screens as results of the tool, ten fewer beyond twenty."""

    def messages(responses: list[str]) -> Messages:
        screens = len(responses) + 1
        folded = 0
        while screens - folded > 20:
            folded += 10
        prompt = said(
            "\nPlease generate the next move according to the UI screenshot, instruction and previous "
            f"actions.\n\nInstruction: {TASK}\n\nPrevious actions:\nNone"
        )
        built = [system(name, date="Thursday, January 01, 2026")]
        for number in range(screens):
            if number == 0:
                built.append(user(prompt) if folded else user(IMAGE, prompt))
            else:
                seen = IMAGE if number >= folded else said("This screenshot has been collapsed.")
                built.append(user(said("<tool_response>\n"), seen, said("\n</tool_response>")))
            if number < len(responses):
                built.append(assistant(responses[number]))
        return built

    return messages


def fara(responses: list[str]) -> Messages:
    """Fara15Agent with max_n_images 3: all responses; a screen that is no longer shown takes its message along."""
    asked = said("Here is the next screenshot. Think about what to do next.")
    built = [system("fara-1.5")]
    for number in range(len(responses) + 1):
        is_shown = number + 3 > len(responses)
        if number == 0:
            built.append(user(IMAGE, said(TASK)) if is_shown else user(said(TASK)))
        elif is_shown:
            built.append(user(IMAGE, asked))
        if number < len(responses):
            built.append(assistant(responses[number]))
    return built


def holo(responses: list[str]) -> Messages:
    """The layout of hub.hcompany.ai/agent-loop: each screen within tags, and the newest three screens."""
    built = [system("holo-3.1"), user(said(TASK))]
    for number in range(len(responses) + 1):
        seen = IMAGE if number + 3 > len(responses) else said("[Image omitted by context cleaning]")
        built.append(user(said("<observation>\n"), seen, said("\n</observation>")))
        if number < len(responses):
            built.append(assistant(f"<think>\n{responses[number]}"))
    return built


def ui_venus(responses: list[str]) -> Messages:
    """VenusComputerAgent with n_img 2: the task in the system message, and an empty one for each dropped screen."""
    built = [system("ui-venus-2", instruction=TASK)]
    for number, response in enumerate(responses):
        is_shown = number >= max(0, len(responses) - 2)
        seen = (said("History Screenshot:\n"), IMAGE) if is_shown else ()
        accepted = response.replace("\n</think>\n\n", "</think>\n")  # with the thought between tags
        built += [user(*seen), assistant(f"<think>{accepted}")]
    return [*built, user(said("Current Screenshot:\n"), IMAGE)]


def ui_venus_1_5(name: str) -> Callable[[list[str]], Messages]:
    """VenusNaviAgent with history_length 0: one message, all steps from 0 on, without their conclusions."""

    def messages(responses: list[str]) -> Messages:
        steps = []
        for number, response in enumerate(responses):
            thought = response.split("<think>")[1].split("</think>")[0].strip("\n")
            call = response.split("<action>")[1].split("</action>")[0].strip("\n")
            steps.append(f"Step {number}: <think>{thought}</think><action>{call}</action>")
        page = (PROMPTS / f"{name}.template.txt").read_bytes().decode()
        asked = page.replace("{instruction}", TASK).replace("{previous}", "\n".join(steps))
        return [system("ui-tars"), user(said(asked), IMAGE)]

    return messages


AGENTS: dict[str, Callable[[list[str]], Messages]] = {
    "ui-tars": ui_tars("ui-tars"),
    "ui-tars-1.5": ui_tars("ui-tars-1.5"),
    "qwen2.5-vl": windowed("qwen2.5-vl", image_first=True),
    "qwen3-vl": windowed("qwen3-vl", image_first=True),
    "qwen3-vl-mobile": qwen3_mobile,
    "gui-owl-1.5": windowed("gui-owl-1.5", image_first=False, begins=""),
    "gui-owl-1.5-mobile": windowed("gui-owl-1.5-mobile", image_first=False, begins=""),
    "mai-ui": mai_ui,
    "ui-venus-1.5": ui_venus_1_5("ui-venus-1.5"),
    "ui-venus-1.5-mobile": ui_venus_1_5("ui-venus-1.5-mobile"),
    "evocua": windowed("evocua", image_first=True),
    "scalecua": scalecua,
    "qwen3.5": qwen_xml("qwen3.5"),
    "qwen3.8": qwen_xml("qwen3.8"),
    "fara-1.5": fara,
    "ui-venus-2": ui_venus,
    "holo-3.1": holo,
}
HYBRIDS = ("qwen3.5", "qwen3.8", "fara-1.5", "ui-venus-2", "holo-3.1")
"""The families of class qwen3_5."""
THOUGHT = re.compile(r"<think>\n.*?</think>\n\n", re.DOTALL)
ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Tokens of Qwen3.5's tokenizer that Qwen3-VL's small model lacks; none of them is special."""


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
    folder = build("qwen3_vl", place / "qwen3_5")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    added = tokenizer["added_tokens"]
    next_id = max(token["id"] for token in added) + 1
    added += [
        {**added[0], "id": next_id + place, "content": token, "special": False}
        for place, token in enumerate(ADDED)
    ]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    loaded["qwen3_5"] = load_policy(folder, weights=False)
    return loaded


def policy_of(name: str, policies: dict[str, LoadedPolicy]) -> LoadedPolicy:
    """The policy of a family, with its chat template."""
    policy = policies[FAMILIES[name].model_types[0]]
    if name in HYBRIDS:
        template = "qwen3_8" if name == "qwen3.8" else "qwen3_5"
        text = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
        policy.tokenizer.chat_template = text
    return policy


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
    assert set(AGENTS) == loaded.union(HYBRIDS)
    assert {name for name, its in FAMILIES.items() if "qwen3_5" in its.model_types} == set(HYBRIDS)


def theirs(policy: LoadedPolicy, name: str, responses: list[str]) -> str:
    thinking = FAMILIES[name].thinking
    options = {} if thinking == "auto" else {"enable_thinking": thinking == "on"}
    return str(
        policy.tokenizer.apply_chat_template(
            AGENTS[name](responses), tokenize=False, add_generation_prompt=True, **options
        )
    )


@pytest.mark.parametrize("past", [0, 2, 7])
@pytest.mark.parametrize("name", [name for name in AGENTS if name not in HYBRIDS])
def test_a_prompt_is_what_the_familys_own_agent_builds(
    name: str, past: int, policies: dict[str, LoadedPolicy]
) -> None:
    policy = policy_of(name, policies)
    written = WRITES[FAMILIES[name].action_parser]
    responses = [written.format(number) for number in range(past)]
    assert ours(policy, name, responses) == theirs(policy, name, responses)


@pytest.mark.parametrize("past", [0, 2, 7, 25])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_of_a_hybrid_is_its_agents_but_for_thoughts_that_the_template_takes_out(
    name: str, past: int, policies: dict[str, LoadedPolicy]
) -> None:
    policy = policy_of(name, policies)
    written = WRITES[FAMILIES[name].action_parser]
    responses = [written.format(number) for number in range(past)]
    mine, expected = ours(policy, name, responses), theirs(policy, name, responses)
    if name in ("qwen3.5", "qwen3.8"):
        assert mine == expected
        return
    # Its later screens are questions to the template, which then shows no thought before them, not even an empty one.
    assert THOUGHT.sub("", mine) == THOUGHT.sub("", expected)
    begins = "<think>\n" if FAMILIES[name].thinking == "on" else "<think>\n\n</think>\n\n"
    assert mine.count("<|im_start|>assistant\n" + begins) == past + 1
    assert expected.count("<|im_start|>assistant\n" + begins) == 1


@pytest.mark.parametrize("thinking", ["on", "off"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_each_prompt_of_a_hybrid_begins_with_the_one_before_and_its_tokens(
    name: str, thinking: str, policies: dict[str, LoadedPolicy]
) -> None:
    """Until an eviction, in tokens that no tokenizer would split so; the first of them is sampled alone."""
    policy = policy_of(name, policies)
    values = {key: value for key, (value, _) in values_of(name).items()}
    least, most = 3, 6
    bounds = {"history_images": least, "history_images_most": most, "thinking": thinking}
    config = PolicyConfig(family=name, **(values | bounds))
    renderer, history = make_renderer(policy, config), history_of(config)
    end = policy.encode_completion("")[-1]
    turns: list[Turn] = []
    before: list[int] = []
    shown = 0
    extends = []
    for step in range(12):
        prompt = renderer.render(TASK, turns, screen()).token_ids
        screens = prompt.count(policy.encode("<|vision_start|>")[0])
        if step:
            extends.append(prompt[: len(before)] == before)
            assert extends[-1] == (screens > shown)
        shown = screens
        text = WRITES[config.action_parser].format(step)
        if thinking == "on":
            text = f"So it is.\n</think>\n\n{text.rpartition('</think>')[2].lstrip()}"
        elif "</think>" in text:
            text = text.rpartition("</think>")[2].lstrip()
        sampled = [*(policy.encode(letter)[0] for letter in "Go."), *policy.encode(text), end]
        before = [*prompt, *sampled]
        turn = Turn(text=f"Go.{text}", token_ids=sampled, screenshot=screen())
        turns = history.visible([*turns, turn])
    assert extends.count(False) == 2  # the evictions, at 7 and at 11 screens


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_text_around_a_later_screen_is_the_tokens_of_the_family(
    name: str, policies: dict[str, LoadedPolicy]
) -> None:
    """<tool_response> is one token, as when the whole prompt is tokenised at once."""
    policy = policy_of(name, policies)
    values = {key: value for key, (value, _) in values_of(name).items()}
    config = PolicyConfig(family=name, **values)
    turns = [Turn(text=WRITES[config.action_parser].format(1), screenshot=screen())]
    prompt = make_renderer(policy, config).render(TASK, turns, screen())
    once = policy.tokenizer.encode(policy.tokenizer.decode(prompt.token_ids))
    assert prompt.token_ids == once
    opening = policy.encode("<tool_response>")
    assert len(opening) == 1
    assert (opening[0] in prompt.token_ids) == (name in ("qwen3.5", "qwen3.8"))


def test_a_hybrids_template_may_be_told_how_long_to_think(
    policies: dict[str, LoadedPolicy],
) -> None:
    policy = policy_of("qwen3.8", policies)

    def begins(**keys: Any) -> str:
        values = {key: value for key, (value, _) in values_of("qwen3.8").items()}
        config = PolicyConfig(family="qwen3.8", **(values | keys))
        prompt = make_renderer(policy, config).render(TASK, [], screen())
        return str(policy.tokenizer.decode(prompt.token_ids[:60]))

    assert "effort" not in begins()
    assert "effort is set to xhigh." in begins(thinking="on")
    assert "effort is set to low." in begins(thinking="on", reasoning_effort="low")
    assert "effort" not in begins(thinking="on", reasoning_effort="medium")
    with pytest.raises(ModelError, match=r"reasoning effort high; set policy\.thinking") as error:
        begins(thinking="on", reasoning_effort="high")
    assert "\n" not in str(error.value)
    assert begins(date="2024-02-29") == begins()  # the date is further behind


def test_a_prompt_tells_the_date_of_the_configuration(policies: dict[str, LoadedPolicy]) -> None:
    policy = policy_of("qwen3.5", policies)
    values = {key: value for key, (value, _) in values_of("qwen3.5").items()}
    config = PolicyConfig(family="qwen3.5", date="2024-02-29", **values)
    prompt = make_renderer(policy, config).render("{date} is a text", [], screen())
    text = str(policy.tokenizer.decode(prompt.token_ids))
    assert 'The current date is Thursday, February 29, 2024".' in text
    assert "Instruction: {date} is a text\n" in text  # an instruction is only text
