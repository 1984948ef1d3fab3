"""A trajectory returns from its files bit for bit; its id follows from its content."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.errors import MissingPartError
from dart_cli.data.exchange.parquet_read import read_folder
from dart_cli.data.exchange.parquet_schema import Trajectory, content_id
from tests.copies import copy_with
from tests.data.exchange.parts import trajectory, written

_logprobs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)

_ids = st.integers(0, 2**31 - 1)


@st.composite
def any_trajectory(draw: st.DrawFn) -> Trajectory:
    """Of any length, tokens, text and numbers; known or not."""
    steps, known = draw(st.integers(1, 4)), draw(st.booleans())
    base = trajectory(steps=steps, task_seed=draw(st.integers(0, 999_999)))
    rows = []
    for row in base.steps:
        tokens = draw(st.lists(_ids, min_size=1, max_size=5))
        count = len(tokens)
        rows.append(
            copy_with(
                row,
                prompt_token_ids=draw(st.lists(_ids, min_size=1, max_size=9)),
                token_ids=tokens,
                behaviour_logprobs=draw(st.lists(_logprobs, min_size=count, max_size=count))
                if known
                else [],
                entropies=draw(st.lists(st.floats(0, 20), min_size=count, max_size=count)),
                text=draw(st.text(st.characters(codec="utf-8"), max_size=20)),
                model_s=draw(st.floats(0, 1e6)),
                reward=draw(st.none() | st.floats(-10, 10)),
            )
        )
    return replace(base, steps=rows, reward=draw(st.floats(0, 1)))


@settings(deadline=None, max_examples=40)
@given(any_trajectory())
def test_a_trajectory_returns_bit_for_bit_under_the_same_content_id(sent: Trajectory) -> None:
    with tempfile.TemporaryDirectory() as folder:
        [back] = read_folder(written(Path(folder) / "out", sent))
    assert list(back.steps) == list(sent.steps)
    assert [[x.hex() for x in s.sampled.behaviour_logprobs] for s in back.steps] == [
        [x.hex() for x in s.sampled.behaviour_logprobs] for s in sent.steps
    ]
    assert back.images == sent.images
    assert replace(back, steps=sent.steps, images=sent.images) == replace(
        sent, final_screenshot=None
    )
    assert content_id(back) == content_id(sent)


POINTER = {
    "token_ids": [9, 20, 21, 22],
    "behaviour_logprobs": [-0.5, -0.25, 0.0, -1 / 3],
    "entropies": [0.5, 0.5, 0.0, 1.5],
}


def test_patches_return_and_are_part_of_the_content(tmp_path: Path) -> None:
    plain = trajectory()
    pointing = [
        replace(
            plain, steps=[copy_with(plain.steps[0], **POINTER, patches=patches), plain.steps[1]]
        )
        for patches in ([-1, -1, -1, 4], [-1, -1, -1, 3])
    ]
    [back] = read_folder(written(tmp_path / "out", pointing[0]))
    assert [step.sampled.patches for step in back.steps] == [[-1, -1, -1, 4], []]
    assert content_id(back) == content_id(pointing[0])
    assert len({content_id(each) for each in (plain, *pointing)}) == 3
    content = [
        [s.image_hashes, s.prompt_token_ids, s.sampled.token_ids, s.sampled.behaviour_logprobs,
         s.text, s.action]
        for s in plain.steps
    ]  # fmt: skip
    older = json.dumps([[plain.task_id, plain.task_seed], content], sort_keys=True)
    assert content_id(plain) == f"x{blake2b(older.encode(), digest_size=16).hexdigest()}"


def test_more_actions_return_and_are_part_of_the_content(tmp_path: Path) -> None:
    plain = trajectory()
    more = [{"kind": "type", "text": "a"}, {"kind": "done"}]
    several = [
        replace(plain, steps=[replace(plain.steps[0], more_actions=actions), plain.steps[1]])
        for actions in (more, more[:1])
    ]
    [back] = read_folder(written(tmp_path / "out", several[0]))
    assert [step.more_actions for step in back.steps] == [more, []]
    assert len({content_id(each) for each in (plain, *several)}) == 3
    assert content_id(back) == content_id(several[0])


def test_what_differs_in_content_has_another_id_and_what_does_not_has_the_same() -> None:
    one = trajectory()
    others = [
        replace(one, task_seed=8),
        replace(one, steps=[copy_with(one.steps[0], token_ids=[9, 7]), one.steps[1]]),
        replace(one, steps=[copy_with(one.steps[0], behaviour_logprobs=[]), one.steps[1]]),
        replace(one, steps=one.steps[:1]),
    ]
    assert len({content_id(each) for each in [one, *others]}) == 5
    later = [replace(row, at=5.0, model_s=3.0, trajectory_id="t9") for row in one.steps]
    assert content_id(replace(one, id="t9", origin="", source="oracle", steps=later)) == content_id(
        one
    )


def test_without_pyarrow_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPartError, match="pip install 'pyarrow"):
        written(tmp_path / "out", trajectory())
    assert list(tmp_path.iterdir()) == []
