"""What a model thought and what it said it would do are found in every action language."""

from __future__ import annotations

import pytest

from dart_cli.config.schema import ACTION_PARSERS
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import make_action_parser
from dart_cli.language.thoughts import thought_and_words
from envs.contract.actions import Action, Click, Done, Type

WORDS = "I click the field (the red one).\nThen I type."
IN_TAGS = ("toolcall-mai", "venus", "venus-web", "venus-mobile")
"""Languages that write the thought of an action into tags."""


@pytest.mark.parametrize("name", ACTION_PARSERS)
@pytest.mark.parametrize("action", [Click(x=3, y=4), Type(text="a(b)"), Done()])
def test_what_an_action_parser_writes_beside_an_action_is_found_again(
    name: str, action: Action
) -> None:
    text = make_action_parser(name).format(action, make_coordinate_map("thousand", 9, 9), WORDS)
    expected = {"compact": ("", "")} | dict.fromkeys(IN_TAGS, (WORDS, ""))
    assert thought_and_words(text) == expected.get(name, ("", WORDS))


@pytest.mark.parametrize(
    ("text", "thought", "words"),
    [
        ("<think>\nWhy?\n</think>\n\nAction: Go.\n<tool_call>\n{}\n</tool_call>", "Why?", "Go."),
        ("Why?\n</think>\n\nclick(1,2)", "Why?", ""),  # the prompt has the opening tag
        ("<thinking>a</thinking><think>b</think>wait()", "ab", ""),
        ("Thought: Why?\nAction: click(start_box='(1,2)')", "", "Why?"),
        (
            "# Step 3:\n## Thought:\nWhy?\n\n## Action:\nGo.\n\n## Code:\n```\nx\n```",
            "",
            "Why?\nGo.",
        ),
        ('{"note": null, "thought": "Why?", "tool_call": {}}', "", "Why?"),
        ('{"thought": 3}', "", ""),
        ('{"thought": "cut o', "", ""),
        ("click(1,2)", "", ""),
        ("I do not know.", "", ""),  # no call
        ("<think>It never ends", "", ""),
        ("", "", ""),
    ],
)
def test_thoughts_stand_in_tags_and_words_before_the_call(
    text: str, thought: str, words: str
) -> None:
    assert thought_and_words(text) == (thought, words)
