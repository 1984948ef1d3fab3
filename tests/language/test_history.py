"""Promises of what the model sees of the past."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages import Turn
from dart_cli.config.schema import PolicyConfig
from dart_cli.doctor.host_memory import EpisodeForm
from dart_cli.doctor.plan import episode_tokens
from dart_cli.language.history import History, history_of

_pasts = st.integers(0, 60).map(
    lambda count: [Turn(text=f"t{i}", screenshot=b"%d" % i) for i in range(count)]
)


@given(_pasts, st.integers(1, 12), st.integers(0, 40))
def test_the_newest_turns_stay_with_the_newest_screenshots(
    past: list[Turn], images: int, turns: int
) -> None:
    seen = History(images, turns).visible(past)
    newest = past[len(past) - min(turns, len(past)) :]
    assert [turn.text for turn in seen] == [turn.text for turn in newest]
    shown = [turn.screenshot for turn in seen if turn.screenshot is not None]
    wanted = [turn.screenshot for turn in newest][max(0, len(newest) - (images - 1)) :]
    assert shown == wanted
    blind = len(seen) - len(shown)
    assert all(turn.screenshot is None for turn in seen[:blind])


@given(_pasts, st.integers(1, 12), st.integers(0, 40))
def test_choosing_twice_changes_nothing(past: list[Turn], images: int, turns: int) -> None:
    history = History(images, turns)
    before = list(past)
    once = history.visible(past)
    assert history.visible(once) == once
    assert past == before


def test_without_turns_only_the_present_is_seen() -> None:
    assert History(5, 0).visible([Turn(text="a", screenshot=b"1")]) == []


def test_one_image_is_the_current_one() -> None:
    seen = History(1, 2).visible([Turn(text="a", screenshot=b"1"), Turn(text="b", screenshot=b"2")])
    assert seen == [Turn(text="a"), Turn(text="b")]


@pytest.mark.parametrize(("images", "turns"), [(0, 0), (1, -1)])
def test_impossible_histories_are_refused(images: int, turns: int) -> None:
    with pytest.raises(ValueError, match="history needs"):
        History(images, turns)


def test_texts_beside_screens_fade_on_their_own() -> None:
    turns = [Turn(text=f"t{i}", screenshot=b"s", observed_text=f"seen {i}") for i in range(4)]
    seen = History(images=2, turns=3, texts=3).visible(turns)
    assert [turn.observed_text for turn in seen] == ["", "seen 2", "seen 3"]
    assert [turn.screenshot for turn in seen] == [None, None, b"s"]
    assert [turn.observed_text for turn in History(2, 3).visible(turns)] == ["", "", ""]


# --- evictions ------------------------------------------------------------------------------------

_evicting = st.builds(
    lambda images, more, turns, texts: History(images, images - 1 + turns, texts, images + more),
    *(st.integers(1, 6), st.integers(1, 6), st.integers(0, 12), st.integers(1, 4)),
)


def screens_seen(step: int, least: int, most: int) -> list[int]:
    """Which screens the prompt of `step` shows, its own included: dropped several at once."""
    first = 0
    for now in range(step + 1):
        if now - first + 1 > most:
            first = now - least + 1
    return list(range(first, step + 1))


def test_screens_are_dropped_several_at_once() -> None:
    history = History(images=3, turns=9, images_most=7)
    seen = [len(_shown(history.visible(past_of(step)))) + 1 for step in range(14)]
    assert seen == [1, 2, 3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4]


@given(_evicting, st.integers(0, 40))
def test_the_screens_of_a_prompt_are_those_since_the_last_eviction(
    history: History, step: int
) -> None:
    wanted = screens_seen(step, history.images, history.images_most)[:-1]
    assert _shown(history.visible(past_of(step))) == [b"%d" % each for each in wanted]


@given(_evicting, st.integers(0, 40))
def test_nothing_leaves_a_prompt_between_two_evictions(history: History, steps: int) -> None:
    before: list[Turn] = []
    for step in range(steps):
        past = past_of(step + 1)
        now = history.visible(past)
        seen = screens_seen(step + 1, history.images, history.images_most)
        if seen[0] == screens_seen(step, history.images, history.images_most)[0]:
            assert now == [*before, past[-1]]
        else:
            assert now == History(history.images, history.turns, history.texts).visible(past)
            assert len(now) == min(history.turns, len(past))
        assert len(now) <= history.turns + history.images_most - history.images
        assert len(_shown(now)) < history.images_most
        before = now


@given(_evicting | st.builds(History, st.integers(1, 6), st.integers(0, 12)), st.integers(0, 40))
def test_turn_after_turn_and_the_whole_past_at_once_show_the_same(
    history: History, steps: int
) -> None:
    kept: list[Turn] = []
    for step, turn in enumerate(past_of(steps), start=1):
        kept = history.visible([*kept, turn])
        assert kept == history.visible(past_of(step))


@pytest.mark.parametrize("images_most", [1, 3])
def test_an_eviction_that_drops_nothing_is_refused(images_most: int) -> None:
    with pytest.raises(ValueError, match="images_most > images"):
        History(3, 9, images_most=images_most)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"history_images": 5, "history_turns": 35}, History(5, 35)),
        (
            {"history_images": 3, "history_turns": 9, "history_images_most": 7},
            History(3, 9, images_most=7),
        ),
    ],
)
def test_a_configuration_names_its_history(keys: dict[str, Any], wanted: History) -> None:
    assert history_of(PolicyConfig(**keys)) == wanted


def past_of(steps: int) -> list[Turn]:
    return [
        Turn(text=f"t{i}", screenshot=b"%d" % i, observed_text=f"seen {i}") for i in range(steps)
    ]


def _shown(turns: Sequence[Turn]) -> list[bytes]:
    return [turn.screenshot for turn in turns if turn.screenshot is not None]


@given(_evicting | st.builds(History, st.integers(1, 6), st.integers(0, 12)), st.integers(1, 30))
def test_the_plan_counts_the_prompts_that_history_makes(history: History, steps: int) -> None:
    """Of doctor: tokens of all steps alone, and the steps of each chain of prompts that extend."""
    form = EpisodeForm(
        steps=steps,
        screen=97,
        completion=11,
        header=5,
        images=history.images,
        most=history.images_most,
        turns=max(history.turns, history.images - 1),
    )
    history = dataclasses.replace(history, turns=form.turns)
    chains: list[int] = []
    alone, before = 0, None
    for step in range(steps):
        seen = history.visible(past_of(step))
        alone += form.header + len(seen) * 11 + (len(_shown(seen)) + 1) * 97 + 11
        if before is not None and [*before, *past_of(step)[-1:]] == seen:
            chains[-1] += 1
        else:
            chains.append(1)
        before = seen
    counted = episode_tokens(form)
    assert counted.alone == alone
    if history.evicts:
        assert [number for _, number in counted.chains] == chains
