"""Messages from an environment that are not consistent are refused before they are filed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from PIL import Image

from bus.errors import ProtocolError
from bus.messages import (
    Hint,
    PointerMap,
    StepRecord,
    VersionSpan,
)
from bus.packed import int32s
from dart_cli.config.load import config_of_model
from dart_cli.config.schema import Config
from dart_cli.data.checks import check_step, model_facts
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.writer import Store
from envs.contract.blobs import content_hash
from tests.copies import copy_with
from tests.data.parts import (
    END,
    PAD,
    START,
    ask_lease,
    make_ledger,
    pointer_record,
    pointing_config,
    state_of,
    step_record,
    trajectory_end,
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"behaviour_logprobs": [-1.0]}, "behaviour_logprobs"),
        ({"behaviour_logprobs": [-1.0, float("-inf"), -1.0]}, "behaviour_logprobs must be finite"),
        ({"entropies": []}, "entropies"),
        ({"entropies": [0.1, float("nan"), 0.1]}, "entropies must be finite"),
        ({"version_spans": []}, "version_spans"),
        ({"version_spans": [VersionSpan(version=0, start=1, end=3)]}, "version_spans"),
        ({"version_spans": [VersionSpan(version=-1, start=0, end=3)]}, "version_spans"),
        ({"token_ids": [1, 2, 2**31]}, "token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "must not be empty"),
        (
            {"token_ids": [], "behaviour_logprobs": [], "entropies": [], "version_spans": []},
            "must not be empty",
        ),
        ({"step": -1}, "step"),
        ({"model_s": float("nan")}, "times"),
        ({"image_hashes": []}, "image_hashes"),
        ({"screenshot": b"another"}, "image_hashes"),
        ({"images": [b"\x89PNG of another prompt"]}, "images must be .* of image_hashes"),
        ({"hint": Hint(start=0, end=42, token_ids=int32s([]))}, "hint is outside of its prompt"),
        ({"hint": Hint(start=9, end=8, token_ids=int32s([]))}, "hint is outside of its prompt"),
        ({"hint": Hint(start=0, end=1, token_ids=int32s([-5]))}, "hint must be in"),
        ({"more_actions": [{"kind": "wait"}] * 32}, "more_actions must be at most 31"),
        ({"action": None, "more_actions": [{"kind": "wait"}]}, "more_actions must .* after action"),
    ],
)
def test_a_step_whose_parts_do_not_fit_is_refused_by_name(
    ledger: Ledger, store: Store, change: dict[str, object], named: str
) -> None:
    lease = ask_lease(ledger, 0)
    with pytest.raises(ProtocolError, match=named):
        ledger.step(copy_with(step_record(lease.trajectory_id, 0), **change))
    assert store.steps(lease.trajectory_id) == []


@pytest.mark.parametrize("change", [{"steps": 2**40}, {"steps": -1}, {"wall_s": float("inf")}])
def test_an_impossible_end_is_refused_and_the_lease_goes_on(
    ledger: Ledger, store: Store, change: dict[str, object]
) -> None:
    lease = ask_lease(ledger, 0)
    with pytest.raises(ProtocolError, match=lease.trajectory_id):
        ledger.end(trajectory_end(lease.trajectory_id, 0).model_copy(update=change))
    assert state_of(store, lease.trajectory_id) == "leased"


@pytest.fixture
def pointing(store: Store, config: Config) -> Ledger:
    return make_ledger(pointing_config(config.run.dir), store)


def test_a_step_with_pointers_is_filed_with_its_patches_and_maps(
    pointing: Ledger, store: Store
) -> None:
    ledger = pointing
    lease = ask_lease(ledger, 0)
    sent = pointer_record(lease.trajectory_id, 0)
    assert ledger.step(sent).accepted
    [row] = store.steps(lease.trajectory_id)
    assert (row.sampled, row.pointed) == (sent.sampled, sent.pointed)
    drawn = [1.0, 0.5, 4.0, 0.5, 0.25, 2.0, 0.125]  # of a forced pad nobody could be unsure
    assert store.entropies(lease.trajectory_id) == {0: drawn}
    found = ledger.group_table.find(lease.trajectory_id)
    assert found is not None
    assert found[1].entropies == {0: fmean(drawn)}
    cut = slice(0, 7)  # a completion may end at its longest within a pointer
    parts = ("token_ids", "behaviour_logprobs", "entropies", "patches")
    shorter = {name: getattr(sent.sampled, name)[cut] for name in parts}
    spans = [VersionSpan(version=0, start=0, end=7)]
    within = pointer_record(
        lease.trajectory_id, 1, **shorter, version_spans=spans, pointed=sent.pointed[:1]
    )
    assert ledger.step(within).accepted


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"patches": [5]}, "1 patches for 9 token_ids"),
        ({"patches": [-1] * 9}, "must be empty"),
        ({"patches": [-2, -1, -1, 5, -1, -1, -1, 0, -1]}, "patches must be -1 or"),
        ({"patches": [-1, -1, -1, 2**31, -1, -1, -1, 0, -1]}, "patches must be -1 or"),
        ({"patches": [-1, 5, -1, -1, -1, -1, -1, 0, -1]}, "patch of token 1 is not that of"),
        ({"patches": [-1, -1, -1, 5, 3, -1, -1, 0, -1]}, "token 4 must have a patch if"),
        ({"patches": [-1, -1, -1, 5, -1, -1, -1, -1, -1]}, "token 7 must have a patch if"),
        ({"token_ids": [5, START, PAD, END, 6, START, END, PAD, 7]}, "token 6 is one of"),
        ({"token_ids": [5, START, PAD, END, 6, 6, PAD, END, 7]}, "token 6 is one of"),
        ({"token_ids": [5, START, PAD, END, END, START, PAD, END, 7]}, "token 4 is one of"),
        ({"token_ids": [5, START, PAD, PAD, 6, START, PAD, END, 7]}, "patch of token 3"),
        ({"behaviour_logprobs": [-0.5] * 9}, "token 2 is forced"),
        ({"entropies": [0.5] * 9}, "token 2 is forced"),
        ({"pointed": [PointerMap(position=3, rows=2, columns=3, heat=b"..")]}, "6|has 2"),
        ({"pointed": [PointerMap(position=2, rows=1, columns=2, heat=b"..")]}, "map of token 2"),
        ({"pointed": [PointerMap(position=3, rows=1, columns=2, heat=b"..")]}, "map of token 3"),
        ({"pointed": [PointerMap(position=9, rows=1, columns=2, heat=b"..")]}, "map of token 9"),
    ],
)
def test_patches_and_maps_that_do_not_fit_are_refused_by_name(
    pointing: Ledger, store: Store, change: dict[str, object], named: str
) -> None:
    lease = ask_lease(pointing, 0)
    with pytest.raises(ProtocolError, match=named):
        pointing.step(pointer_record(lease.trajectory_id, 0, **change))
    assert store.steps(lease.trajectory_id) == []


def blank(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_the_model_tells_the_pointers_tokens_and_the_cells_of_a_screenshot(
    store: Store, config: Config, pointer_folder: Callable[[str], Path]
) -> None:
    folder = pointer_folder("builtin:tiny")
    config = pointing_config(config.run.dir, model={"path": str(folder)})
    facts = model_facts(config)
    assert facts is not None
    assert facts.pointer is not None
    start, pad, end = facts.pointer
    own = {"token_ids": [5, start, pad, end, 6, start, pad, end, 7]}
    ledger = make_ledger(config, store)
    name = ask_lease(ledger, 0).trajectory_id

    def record(step: int, width: int, height: int, **changes: object) -> StepRecord:
        screen = blank(width, height)
        shown = {"screenshot": screen, "image_hashes": [content_hash(screen)]}
        return pointer_record(name, step, **{**shown, **own, **changes})

    assert ledger.step(record(0, 84, 56)).accepted, "3 x 2 cells"
    with pytest.raises(ProtocolError, match="patch 5, but the last screenshot has 1 cells"):
        ledger.step(record(1, 28, 28))
    with pytest.raises(ProtocolError, match="token 3 must have a patch"):
        ledger.step(record(1, 84, 56, patches=[], pointed=[]))
    with pytest.raises(ProtocolError, match="token 3 must have a patch if"):
        ledger.step(record(1, 84, 56, token_ids=[5, START, PAD, END, 6, START, PAD, END, 7]))


def test_a_policy_that_writes_numbers_has_no_patches(ledger: Ledger) -> None:
    lease = ask_lease(ledger, 0)
    with pytest.raises(ProtocolError, match=r"there are patches, .* here it is text"):
        ledger.step(pointer_record(lease.trajectory_id, 0))


def test_routing_must_be_that_of_the_runs_model(
    tmp_path: Path, family: Callable[[str], Path]
) -> None:
    """Four layers of qwen3_5_moe with two of eight experts: eight bytes for each computed token."""
    record = step_record("g1-00", 0)
    tokens = len(record.prompt_token_ids) + len(record.sampled.token_ids) - 1

    def refusal(routing: bytes, kind: str = "qwen3_5_moe") -> str:
        config = config_of_model(family(kind), ["rollout.engine=transformers"])
        sampled = record.sampled.model_copy(update={"routing": routing})
        try:
            check_step(record.model_copy(update={"sampled": sampled}), config)
        except ProtocolError as error:
            return str(error)
        return ""

    assert refusal(bytes([0, 7] * 4 * tokens)) == ""
    assert refusal(b"") == ""
    assert "each must have equally many" in refusal(bytes(8 * tokens - 1))
    assert "at most 4096" in refusal(bytes(5000 * tokens))
    assert "routing has 9 bytes for each token, the model 8" in refusal(bytes(9 * tokens))
    assert "an expert beyond the 8" in refusal(bytes(8 * tokens - 1) + b"\x08")
    assert "which the model is not" in refusal(bytes(8 * tokens), "qwen3_5")
