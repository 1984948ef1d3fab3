"""Actions are written in tokens that all differ wherever a vocabulary allows it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import make_action_parser
from dart_cli.smoke_test.spellings import Spellings, Step, distinct_steps, read, spellings_of
from envs.contract.actions import Action, Click, Done

COORDINATES = make_coordinate_map("thousand", 320, 240)
CLICK = Click(x=75, y=44)  # at (236, 185), in which no digit repeats
TAGS = ("<tool_call>", "</tool_call>", "<", ">", "/", "=", "</", "><", "></", ">\n", ">\n\n", "\n")
WORDS = "parameter param eter para meter par ame ter function <f f unction".split()
REST = "computer =com puter _use =a action ction left _click terminate coordinate".split()


def vocabulary_of(*tokens: str) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def first_way(
    action: Action, vocabulary: dict[str, int], earlier: Sequence[Step] = ()
) -> list[Step] | None:
    ways = (
        distinct_steps(spellings.steps(vocabulary.get), earlier, ())
        for spellings in spellings_of(make_action_parser("toolcall-xml"), action, COORDINATES)
    )
    return next(filter(None, ways), None)


def text_of(way: Sequence[Step]) -> str:
    return "".join(step.text for step in way)


def test_an_xml_call_is_written_in_tokens_that_all_differ() -> None:
    """Its tags have the same word four times, so it depends on the whitespace between them."""
    vocabulary = vocabulary_of(*TAGS, *WORDS, *REST, *"0123456789,", "[", "]", "]</", ">[", " </")
    click = first_way(CLICK, vocabulary)
    assert click is not None
    assert len({step.token for step in click}) == len(click)
    parser = make_action_parser("toolcall-xml")
    assert read(parser, text_of(click), COORDINATES) == CLICK

    done = first_way(Done(), vocabulary, click)
    assert done is not None
    assert read(parser, text_of(done), COORDINATES) == Done()
    assert len({step.token for step in done}) == len(done)
    shared = {step.token for step in click} & {step.token for step in done}
    tokens = [step.token for step in done]
    differs = [index for index, token in enumerate(tokens) if token not in shared]
    assert differs == [*range(differs[0], differs[-1] + 1)]  # it begins and ends like the click
    assert differs[0] > 3
    assert tokens[-1] == click[-1].token


def test_what_a_vocabulary_cannot_write_is_refused() -> None:
    vocabulary = vocabulary_of(*TAGS, "parameter", "function", *REST, *"0123456789[],")
    assert first_way(CLICK, vocabulary) is None


@pytest.mark.parametrize(
    "name", ["toolcall-xml", "toolcall", "uitars", "venus", "venus-web", "toolcall-fara"]
)
@pytest.mark.parametrize("action", [CLICK, Done()])
def test_each_way_through_the_spellings_means_the_action(name: str, action: Action) -> None:
    parser, generator = make_action_parser(name), random.Random(0)
    wanted = read(parser, parser.format(action, COORDINATES), COORDINATES)
    for spellings in spellings_of(parser, action, COORDINATES):
        for _ in range(5):
            place, text = 0, ""
            while spellings.symbols[place]:
                symbol, place = generator.choice(spellings.symbols[place])
                assert isinstance(symbol, str)
                text += symbol
            assert read(parser, text, COORDINATES) == wanted


def exhaustive(steps: Sequence[Sequence[Step]], place: int, used: frozenset[int]) -> bool:
    """Return whether any way to the last place has only tokens that differ, by trying all of them."""
    return place == len(steps) - 1 or any(
        exhaustive(steps, step.place, used | {step.token})
        for step in steps[place]
        if step.token not in used
    )


def test_ways_of_random_vocabularies_are_found_if_there_are_any() -> None:
    """The search is no proof: it may miss one in twenty of those that the exhaustive one finds."""
    generator = random.Random(0)
    possible = found = greedy = 0
    for _ in range(600):
        text = "".join(generator.choice("abc") for _ in range(14))
        pieces = {text[at : at + generator.randint(1, 4)] for at in range(14) for _ in range(2)}
        vocabulary = vocabulary_of(*generator.sample(sorted(pieces), k=min(12, len(pieces))))
        symbols = [[(letter, place + 1)] for place, letter in enumerate(text)]
        steps = Spellings(Done(), [*symbols, []]).steps(vocabulary.get)
        way = distinct_steps(steps, (), ())
        exists = exhaustive(steps, 0, frozenset())
        possible += exists
        if way is not None:
            assert text_of(way) == text
            assert len({step.token for step in way}) == len(way)
            assert exists
            found += 1
            longest, place = set[int](), 0
            while steps[place] and steps[place][0].token not in longest:
                longest.add(steps[place][0].token)
                place = steps[place][0].place
            greedy += place == len(text)
    assert possible > 100
    assert found >= 0.95 * possible
    assert greedy < 0.7 * found  # long tokens first do not suffice
