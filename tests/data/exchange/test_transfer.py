"""Trajectories leave a run and enter another unchanged; what is wrong in a foreign file enters none."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bus.errors import ExchangeError, MissingPartError, RunDirectoryError
from bus.messages import SampledTokens
from dart_cli.config.schema import Config
from dart_cli.data.exchange.compatibility import model_facts
from dart_cli.data.exchange.parquet_read import read_folder
from dart_cli.data.exchange.parquet_schema import COLUMNS, Trajectory, content_id
from dart_cli.data.exchange.parquet_write import write_folder
from dart_cli.data.exchange.transfer import (
    Choice,
    add_folder,
    chosen,
    export_run,
    import_folder,
    import_pool,
)
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.rows import StepRow
from dart_cli.policy.model import load_policy
from envs.base import content_hash
from tests.altered import altered
from tests.data.parts import make_ledger, play_group, small_config

TASK = "mini/click"


def png(*seed: int) -> bytes:
    """A small picture, other ones for other seeds."""
    file = io.BytesIO()
    Image.new("RGB", (28, 28), tuple(hash((*seed, i)) % 256 for i in range(3))).save(file, "PNG")
    return file.getvalue()


def step(number: int, image: bytes, earlier: list[str], **changes: Any) -> StepRow:
    row = StepRow(
        trajectory_id="t0",
        step=number,
        at=0.0,
        screenshot=content_hash(image),
        image_hashes=[*earlier, content_hash(image)],
        prompt_token_ids=[4, 5, 6 + number],
        sampled=SampledTokens(
            token_ids=[9, 8],
            behaviour_logprobs=[-0.5, -1 / 3],
            entropies=[0.25, 1.5],
            version_spans=[],
        ),
        text="click(1,2)",
        action={"kind": "click", "x": 1, "y": 2, "button": "left"},
        error="",
        model_s=0.5,
        env_s=0.25,
        worker="",
    )
    return replace(row, **changes)


def trajectory(name: str = "t0", steps: int = 2, **changes: Any) -> Trajectory:
    """A success; each prompt shows the screen before it, too."""
    shots = [png(number, len(name)) for number in range(steps)]
    keys = [content_hash(shot) for shot in shots]
    rows = [
        step(i, shot, keys[max(0, i - 1) : i], trajectory_id=name) for i, shot in enumerate(shots)
    ]
    whole = Trajectory(
        id=name,
        suite="mini",
        task_id=TASK,
        task_seed=7,
        instruction="click the red button",
        source="online",
        origin=f"elsewhere/{name}",
        outcome="pass",
        verdict_reason="the goal is reached",
        stop_reason="done",
        steps=rows,
        images=dict(zip(keys, shots, strict=True)),
        final_screenshot=png(99),
    )
    return replace(whole, **changes)


def written(folder: Path, *trajectories: Trajectory, **options: Any) -> Path:
    with write_folder(folder, {"run": "r"}, **options) as shards:
        for each in trajectories:
            shards.add(each)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run whose engine has no model, so that any tokens fit it."""
    return Config.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "rollout": {"engine": "scripted"},
            "env": {"tasks": [TASK, "mini/popup"]},
        }
    )


# --- the files ------------------------------------------------------------------------------

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
            altered(
                row,
                prompt_token_ids=draw(st.lists(_ids, min_size=1, max_size=9)),
                token_ids=tokens,
                behaviour_logprobs=draw(st.lists(_logprobs, min_size=count, max_size=count))
                if known
                else [],
                entropies=draw(st.lists(st.floats(0, 20), min_size=count, max_size=count)),
                text=draw(st.text(st.characters(codec="utf-8"), max_size=20)),
                model_s=draw(st.floats(0, 1e6)),
            )
        )
    return replace(base, steps=rows)


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


def test_what_differs_in_content_has_another_id_and_what_does_not_has_the_same() -> None:
    one = trajectory()
    others = [
        replace(one, task_seed=8),
        replace(one, steps=[altered(one.steps[0], token_ids=[9, 7]), one.steps[1]]),
        replace(one, steps=[altered(one.steps[0], behaviour_logprobs=[]), one.steps[1]]),
        replace(one, steps=one.steps[:1]),
    ]
    assert len({content_id(each) for each in [one, *others]}) == 5
    later = [replace(row, at=5.0, model_s=3.0, trajectory_id="t9") for row in one.steps]
    assert content_id(replace(one, id="t9", origin="", source="oracle", steps=later)) == content_id(
        one
    )


def test_hugging_face_datasets_is_told_that_screenshots_are_images(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", trajectory())
    table = pq.read_table(folder / "trajectories-00000.parquet")
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert list(features) == table.column_names == list(COLUMNS)
    assert features["screenshot"] == features["final_screenshot"] == {"_type": "Image"}
    assert features["token_ids"]["feature"] == {"dtype": "int32", "_type": "Value"}
    first, last = table.to_pylist()
    assert Image.open(io.BytesIO(first["screenshot"]["bytes"])).size == (28, 28)
    assert first["screenshot"]["path"].endswith(".png")
    assert first["final_screenshot"] is None
    assert last["final_screenshot"]["bytes"] == png(99)


def test_shards_end_between_trajectories_and_read_back_in_order(tmp_path: Path) -> None:
    sent = [trajectory(f"t{i}", steps=1 + i % 3, task_seed=i) for i in range(12)]
    folder = written(tmp_path / "out", *sent, shard_bytes=3000)
    files = sorted(folder.glob("*.parquet"))
    assert len(files) > 2
    for file in files:
        rows = pq.read_table(file, columns=["step", "steps"]).to_pylist()
        assert rows[0]["step"] == 0
        assert rows[-1]["step"] == rows[-1]["steps"] - 1
    assert [each.id for each in read_folder(folder)] == [each.id for each in sent]


def _write_in_vain(folder: Path) -> None:
    with write_folder(folder, {}) as shards:
        shards.add(trajectory())
        shards.close()
        raise ValueError("halfway")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="halfway"):
        _write_in_vain(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    written(tmp_path / "out", trajectory())
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ExchangeError, match="exists already"):
        written(tmp_path / "out", trajectory("t1"))
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_without_pyarrow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPartError, match="pip install 'pyarrow"):
        written(tmp_path / "out", trajectory())
    assert list(tmp_path.iterdir()) == []


# --- into a run -----------------------------------------------------------------------------


def test_successes_join_the_pool_once_however_often_they_come(
    tmp_path: Path, config: Config
) -> None:
    sent = [trajectory(), trajectory("t1", outcome="fail"), trajectory("t2", steps=3)]
    folder = written(tmp_path / "out", *sent)
    first = import_folder(config, folder)
    assert (first.joined, first.there, first.not_passed) == (2, 0, 1)
    again = import_folder(config, folder)
    assert (again.joined, again.there, again.not_passed) == (0, 2, 1)
    with open_reader(config.run.dir) as reader:
        members = reader.pool()
        assert {m.trajectory_id for m in members} == {content_id(sent[0]), content_id(sent[2])}
        assert {(m.source, m.known, m.origin) for m in members} == {
            ("imported", True, "elsewhere/t0"),
            ("imported", True, "elsewhere/t2"),
        }
        steps = reader.steps(content_id(sent[2]))
        assert [s.sampled.behaviour_logprobs for s in steps] == [[-0.5, -1 / 3]] * 3
        assert [s.image_hashes for s in steps] == [s.image_hashes for s in sent[2].steps]
        assert all(s.sampled.version_spans == [] for s in steps)
        assert [s.instruction for s in steps] == ["click the red button", "", ""]
        assert reader.screenshots(sent[2].images) == sent[2].images


def test_a_run_does_not_import_what_it_played_itself(tmp_path: Path, config: Config) -> None:
    with open_store(config.run.dir) as store:
        run = store.begin_run(0, config.model_dump_json(), [])
        ledger = make_ledger(small_config(config.run.dir), store)
        group = play_group(ledger, ["pass", "fail", "fail", "fail"])
        store.commit()
        folder = written(tmp_path / "out", trajectory(origin=f"{run.id}/{group}-00"))
        done = add_folder(store, config, folder)
    assert (done.joined, done.there) == (0, 1)


def test_a_live_run_is_refused_with_the_cure(tmp_path: Path, config: Config) -> None:
    folder = written(tmp_path / "out", trajectory())
    with (
        open_store(config.run.dir),
        pytest.raises(RunDirectoryError, match=r"in use.*data\.pool = \["),
    ):
        import_folder(config, folder)


def test_the_folders_of_data_pool_join_at_the_start_and_are_read_again_when_they_change(
    tmp_path: Path, config: Config
) -> None:
    folders = [written(tmp_path / name, trajectory(steps=n)) for n, name in ((1, "a"), (2, "b"))]
    changed = config.model_copy(update={"data": config.data.model_copy(update={"pool": folders})})
    with open_store(config.run.dir) as store:
        import_pool(changed, store)
        assert sorted(row.steps for row in store.pool()) == [1, 2]
        [file] = folders[0].iterdir()
        stamp = file.stat()
        file.write_bytes(bytes(stamp.st_size))
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        import_pool(changed, store)  # as it was, by all that is looked at: not read
        written(tmp_path / "c", trajectory(steps=3))
        file.unlink()
        (tmp_path / "c" / "trajectories-00000.parquet").rename(file)
        import_pool(changed, store)
        assert sorted(row.steps for row in store.pool()) == [1, 2, 3]


def test_what_was_exported_is_what_the_run_holds(tmp_path: Path, config: Config) -> None:
    source = small_config(tmp_path / "source")
    with open_store(source.run.dir) as store:
        ledger = make_ledger(source, store)
        play_group(ledger, ["pass", "fail", "fail", "pass"])
        store.commit()
    with open_reader(source.run.dir) as reader:
        ids = chosen(reader, Choice(outcome="fail"))
        assert len(ids) == 2
        assert len(chosen(reader, Choice())) == 4
        assert chosen(reader, Choice(tasks=("mini/none",))) == []
        twice = tuple(row.task_id for row in reader.groups()) * 2
        assert chosen(reader, Choice(tasks=twice)) == chosen(reader, Choice())
        done = export_run(reader, ids, tmp_path / "out")
        assert (done.trajectories, done.steps, done.skipped) == (2, 4, 0)
        rows = pq.read_table(tmp_path / "out").to_pylist()
        run = reader.run().id
        for row in rows:
            kept = reader.steps(row["trajectory_id"])[row["step"]]
            assert row["behaviour_logprobs"] == kept.sampled.behaviour_logprobs
            assert row["prompt_token_ids"] == kept.prompt_token_ids
            assert row["versions"] == [0, 0, 0]
            assert row["instruction"] == "click the red one"
            assert row["origin"] == f"{run}/{row['trajectory_id']}"
            assert (row["outcome"], row["source"]) == ("fail", "online")
        with pytest.raises(ExchangeError, match="nothing to export"):
            export_run(reader, [], tmp_path / "none")
    assert not (tmp_path / "none").exists()


# --- foreign files --------------------------------------------------------------------------

Change = Callable[[list[dict[str, Any]]], None]


def put(row: int, column: str, value: Any) -> Change:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[row][column] = value

    return change


def everywhere(column: str, value: Any) -> Change:
    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row[column] = value

    return change


def swap(rows: list[dict[str, Any]]) -> None:
    rows[0], rows[1] = rows[1], rows[0]


def scatter(rows: list[dict[str, Any]]) -> None:
    """A one-step trajectory comes again behind another."""
    for row in rows:
        row |= {"step": 0, "steps": 1, "image_hashes": row["image_hashes"][-1:]}
    rows[1]["trajectory_id"] = "another"


CUT = {"bytes": png(0, 2)[:-30], "path": None}
MISTAKES: dict[str, tuple[Change, int, str, str]] = {
    "a gap": (put(1, "step", 3), 1, "step", "must be 1, got 3"),
    "unsorted": (swap, 0, "step", "sort the data"),
    "scattered": (scatter, 2, "trajectory_id", "not adjacent"),
    "too few": (everywhere("steps", 4), 2, "steps", "3 rows of 4"),
    "too many": (everywhere("steps", 2), 2, "step", "more rows"),
    "no steps": (everywhere("steps", 0), 0, "steps", "greater than or equal to 1"),
    "a negative token": (put(1, "token_ids", [3, -1]), 1, "token_ids[1]", "-1"),
    "no token": (put(1, "token_ids", []), 1, "token_ids", "at least 1"),
    "no number": (
        put(2, "behaviour_logprobs", [-1.0, float("nan")]),
        2,
        "behaviour_logprobs[1]",
        "finite",
    ),
    "a probability": (put(0, "behaviour_logprobs", [0.5, -1.0]), 0, "behaviour_logprobs[0]", "0.5"),
    "one too few": (
        put(1, "behaviour_logprobs", [-1.0]),
        1,
        "behaviour_logprobs",
        "1 values for 2",
    ),
    "half known": (put(1, "behaviour_logprobs", []), 1, "behaviour_logprobs", "some steps only"),
    "entropies": (put(1, "entropies", [0.1]), 1, "entropies", "1 values for 2"),
    "an unknown image": (put(1, "image_hashes", ["0" * 32]), 1, "image_hashes", "must be"),
    "an image of nowhere": (
        lambda rows: rows[1]["image_hashes"].insert(0, "0" * 32),
        1,
        "image_hashes",
        "no earlier screenshot",
    ),
    "a cut image": (
        lambda rows: rows[0].update(
            screenshot=CUT,
            image_hashes=[content_hash(CUT["bytes"])],  # type: ignore[arg-type]
        ),
        0,
        "screenshot",
        "no whole PNG or JPEG",
    ),
    "no image": (
        put(1, "screenshot", {"bytes": None, "path": "a.png"}),
        1,
        "screenshot[bytes]",
        "bytes",
    ),
    "no JSON": (put(1, "action", "__import__('os')"), 1, "action", "is not JSON"),
    "no action": (put(1, "action", '{"kind": "explode"}'), 1, "action", "no action of"),
    "a list": (put(1, "action", "[1]"), 1, "action", "JSON object"),
    "half a character": (
        put(1, "action", json.dumps({"kind": "type", "text": "\ud800"})),
        1,
        "action",
        "lone surrogate",
    ),
    "another outcome": (everywhere("outcome", "won"), 0, "outcome", "pass"),
    "another source": (everywhere("source", "magic"), 0, "source", "oracle"),
    "a changed task": (
        put(1, "task_id", "mini/popup"),
        1,
        "task_id",
        "differs from that of step 0",
    ),
    "another suite": (everywhere("suite", "desk"), 0, "suite", "env.suite"),
    "a misspelt task": (everywhere("task_id", "mini/clik"), 0, "task_id", "did you mean"),
    "a held-out task": (everywhere("task_id", "mini/popup+menu"), 0, "task_id", "held out"),
    "a held-out seed": (everywhere("task_seed", 1_000_000), 0, "task_seed", "held out"),
    "a control character": (everywhere("trajectory_id", "a\nb"), 0, "trajectory_id", "pattern"),
}


def foreign(folder: Path, change: Change) -> Path:
    """A good trajectory, then one of three steps that `change` spoils."""
    rows = pq.read_table(written(folder / "good", trajectory("t8", steps=3))).to_pylist()
    change(rows)
    good = pq.read_table(folder / "good").schema
    (folder / "bad").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=good), folder / "bad" / "b.parquet")
    written(folder / "first", trajectory("first"))
    (folder / "first" / "trajectories-00000.parquet").rename(folder / "bad" / "a.parquet")
    return folder / "bad"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_file_row_and_column_and_nothing_is_imported(
    name: str, tmp_path: Path, config: Config
) -> None:
    change, row, column, cure = MISTAKES[name]
    folder = foreign(tmp_path, change)
    open_store(config.run.dir).close()
    with pytest.raises(ExchangeError) as error:
        import_folder(config, folder)
    told = str(error.value)
    assert told.startswith(f"{folder / 'b.parquet'} row {row}, column {column}: ")
    assert cure in told
    assert "\n" not in told
    with open_reader(config.run.dir) as reader:
        assert reader.pool() == []
        assert reader.total("steps") == reader.total("screenshots") == 0


def test_a_mistake_makes_no_run(tmp_path: Path, config: Config) -> None:
    with pytest.raises(ExchangeError):
        import_folder(config, foreign(tmp_path, everywhere("steps", 4)))
    assert not config.run.dir.exists()


def test_a_file_without_a_column_or_of_another_type_is_refused(
    tmp_path: Path, config: Config
) -> None:
    table = pq.read_table(written(tmp_path / "good", trajectory()))
    file = tmp_path / "f.parquet"
    pq.write_table(table.drop_columns(["token_ids"]), file)
    with pytest.raises(ExchangeError, match=r"f\.parquet: column token_ids is missing"):
        import_folder(config, file)
    words = table.set_column(
        table.column_names.index("step"), "step", pa.array(["one", "two"], pa.string())
    )
    pq.write_table(words, file)
    with pytest.raises(ExchangeError, match="column step: "):
        import_folder(config, file)
    links = pa.array(["a.png", "b.png"], pa.string())
    pq.write_table(
        table.set_column(table.column_names.index("screenshot"), "screenshot", links), file
    )
    with pytest.raises(ExchangeError, match="with its bytes in it"):
        import_folder(config, file)
    bytes_of = pa.array([b"\xff", b"\xff"], pa.binary()).buffers()
    no_text = pa.StringArray.from_buffers(2, bytes_of[1], bytes_of[2])
    pq.write_table(table.set_column(table.column_names.index("text"), "text", no_text), file)
    with pytest.raises(ExchangeError, match=r"column text: .*utf-8"):
        import_folder(config, file)
    pq.write_table(table.replace_schema_metadata({b"dart": b"[" * 100_000}), file)
    with pytest.raises(ExchangeError, match="metadata `dart` is damaged"):
        import_folder(config, file)
    file.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ExchangeError, match="no Parquet file"):
        import_folder(config, file)
    with pytest.raises(ExchangeError, match="no such folder"):
        import_folder(config, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExchangeError, match=r"no \*\.parquet"):
        import_folder(config, tmp_path / "empty")


def test_other_types_of_the_same_meaning_and_absent_optional_columns_are_taken(
    tmp_path: Path, config: Config
) -> None:
    table = pq.read_table(written(tmp_path / "good", trajectory(source="imported")))
    table = table.drop_columns([name for name, column in COLUMNS.items() if column.optional])
    for name, kind in (
        ("text", pa.large_string()),
        ("step", pa.int64()),
        ("token_ids", pa.large_list(pa.int64())),
    ):
        column = table.column(name).cast(kind)
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, tmp_path / "f.parquet")
    assert import_folder(config, tmp_path / "f.parquet").joined == 1


def test_a_newer_format_is_refused(tmp_path: Path, config: Config) -> None:
    with write_folder(tmp_path / "out", {"format": 99}) as shards:
        shards.add(trajectory())
    with pytest.raises(ExchangeError, match="newer dart"):
        import_folder(config, tmp_path / "out")


# --- tokens of another model ----------------------------------------------------------------


def test_the_tokens_that_nobody_writes_are_those_that_the_trainer_refuses() -> None:
    facts = model_facts(Config())
    assert facts is not None
    assert facts.forbidden == set(load_policy("builtin:tiny").forbidden_token_ids)


def one_screen(size: tuple[int, int]) -> Trajectory:
    """A success of one step on a screen of that size."""
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    shot = file.getvalue()
    return replace(trajectory(), steps=[step(0, shot, [])], images={content_hash(shot): shot})


def test_tokens_that_the_model_cannot_take_are_refused(tmp_path: Path, config: Config) -> None:
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"engine": "transformers"})}
    )
    facts = model_facts(config)
    assert facts is not None
    with pytest.raises(ExchangeError, match=r"column prompt_token_ids: \d image placeholders"):
        import_folder(config, written(tmp_path / "a", trajectory()))
    one = trajectory(steps=1)
    fitting = [facts.image_token, 9]  # 28 x 28 pixels are one place
    fits = replace(one, steps=[replace(one.steps[0], prompt_token_ids=fitting)])
    assert import_folder(config, written(tmp_path / "b", fits)).joined == 1
    for name, ids in (("c", [facts.vocabulary]), ("d", [9] * facts.max_positions)):
        wrong = replace(one, steps=[replace(one.steps[0], prompt_token_ids=[*fitting, *ids])])
        with pytest.raises(ExchangeError, match="column prompt_token_ids"):
            import_folder(config, written(tmp_path / name, wrong))
    for name, ids in (("g", [9, 1]), ("h", [9, 4]), ("i", [9, facts.image_token])):
        wrong = replace(fits, steps=[altered(fits.steps[0], token_ids=ids)])
        with pytest.raises(ExchangeError, match=r"column token_ids: .* no policy samples"):
            import_folder(config, written(tmp_path / name, wrong))
    apart = one_screen((56, 28))
    prompt = [facts.image_token, 9, facts.image_token]
    apart = replace(apart, steps=[replace(apart.steps[0], prompt_token_ids=prompt)])
    with pytest.raises(ExchangeError, match=r"column prompt_token_ids: .* not adjacent"):
        import_folder(config, written(tmp_path / "j", apart))
    with pytest.raises(ExchangeError, match=r"row 0, column screenshot: .* too long a strip"):
        import_folder(config, written(tmp_path / "f", one_screen((2100, 7))))
    with write_folder(tmp_path / "e", {"vocabulary": "of another"}) as shards:
        shards.add(fits)
    with pytest.raises(ExchangeError, match="another model"):
        import_folder(config, tmp_path / "e")
