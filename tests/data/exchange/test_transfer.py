"""Trajectories leave a run and enter another unchanged."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bus.errors import ExchangeError, RunDirectoryError
from dart_cli.config.schema import Config, PolicyConfig
from dart_cli.data.exchange import transfer
from dart_cli.data.exchange.parquet_read import read_folder
from dart_cli.data.exchange.parquet_schema import content_id
from dart_cli.data.exchange.transfer import (
    ImportCounts,
    Selection,
    add_folder,
    export_run,
    import_folder,
    import_pool,
    select_ids,
)
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.rows import PlannedSample
from dart_cli.data.store.writer import Store
from tests.copies import copy_with
from tests.data.exchange.parts import trajectory, written
from tests.data.parts import DRAG, make_ledger, play_group, small_config


def test_successes_join_the_pool_once_however_often_they_come(
    tmp_path: Path, config: Config
) -> None:
    sent = [trajectory(), trajectory("t1", outcome="fail"), trajectory("t2", steps=3)]
    folder = written(tmp_path / "out", *sent)
    first = import_folder(config, folder)
    assert (first.joined, first.already_there, first.not_passed) == (2, 0, 1)
    again = import_folder(config, folder)
    assert (again.joined, again.already_there, again.not_passed) == (0, 2, 1)
    with open_reader(config.run.dir) as reader:
        members = reader.pool()
        assert {m.trajectory_id for m in members} == {content_id(sent[0]), content_id(sent[2])}
        assert {(m.source, m.has_logprobs, m.origin) for m in members} == {
            ("imported", True, "elsewhere/t0"),
            ("imported", True, "elsewhere/t2"),
        }
        steps = reader.steps(content_id(sent[2]))
        assert [s.sampled.behaviour_logprobs for s in steps] == [[-0.5, -1 / 3]] * 3
        assert [s.image_hashes for s in steps] == [s.image_hashes for s in sent[2].steps]
        assert all(s.sampled.version_spans == [] for s in steps)
        assert [s.instruction for s in steps] == ["click the red button", "", ""]
        assert reader.screenshots(sent[2].images) == sent[2].images


@pytest.mark.parametrize("encoding", ["webp", "jpeg"])
def test_screens_of_each_encoding_come_as_they_were_with_their_names_and_kinds(
    tmp_path: Path, config: Config, encoding: str
) -> None:
    sent = trajectory(encoding=encoding)
    folder = written(tmp_path / "out", sent)
    suffix = {"jpeg": "jpg"}.get(encoding, encoding)
    paths = [row["screenshot"]["path"] for row in pq.read_table(folder).to_pylist()]
    assert paths == [f"{step.screenshot}.{suffix}" for step in sent.steps]
    assert import_folder(config, folder).joined == 1
    with open_reader(config.run.dir) as reader:
        assert reader.screenshots(sent.images) == sent.images
        kinds = {row["media_type"] for row in reader._rows("SELECT media_type FROM screenshots")}
    assert f"image/{encoding}" in kinds


def test_a_run_does_not_import_what_it_played_itself(tmp_path: Path, config: Config) -> None:
    with open_store(config.run.dir) as store:
        run = store.begin_run(0, config.model_dump_json(), [])
        ledger = make_ledger(small_config(config.run.dir), store)
        group = play_group(ledger, ["pass", "fail", "fail", "fail"])
        store.commit()
        folder = written(tmp_path / "out", trajectory(origin=f"{run.id}/{group}-00"))
        done = add_folder(store, config, folder)
    assert (done.joined, done.already_there) == (0, 1)


def test_a_live_run_is_refused_with_the_cure(tmp_path: Path, config: Config) -> None:
    folder = written(tmp_path / "out", trajectory())
    with (
        open_store(config.run.dir),
        pytest.raises(RunDirectoryError, match=r"in use.*data\.pool = \["),
    ):
        import_folder(config, folder)


def test_the_folders_of_data_pool_join_at_the_start_and_are_read_again_when_they_change(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def adding(store: Store, config: Config, folder: Path) -> ImportCounts:
        read.append(folder)
        return add_folder(store, config, folder)

    monkeypatch.setattr(transfer, "add_folder", adding)
    folders = [written(tmp_path / name, trajectory(steps=n)) for n, name in ((1, "a"), (2, "b"))]
    changed = config.model_copy(update={"data": config.data.model_copy(update={"pool": folders})})
    with open_store(config.run.dir) as store:
        import_pool(changed, store)
        assert sorted(row.steps for row in store.pool()) == [1, 2]
        import_pool(changed, store)
        assert read == folders
        held = changed.env.model_copy(update={"heldout": ["mini/menu"]})
        import_pool(changed.model_copy(update={"env": held}), store)
        assert read == 2 * folders
        [file] = folders[0].iterdir()
        stamp = file.stat()
        file.write_bytes(bytes(stamp.st_size))
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        with pytest.raises(ExchangeError, match="is no Parquet file"):
            import_pool(changed, store)
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
        ids = select_ids(reader, Selection(outcome="fail"))
        assert len(ids) == 2
        assert len(select_ids(reader, Selection())) == 4
        assert select_ids(reader, Selection(tasks=("mini/none",))) == []
        twice = tuple(row.task_id for row in reader.groups()) * 2
        assert select_ids(reader, Selection(tasks=twice)) == select_ids(reader, Selection())
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


def test_patches_go_from_run_to_run_and_into_batches(tmp_path: Path, config: Config) -> None:
    """Those of another run's success are trained on like its tokens; heat maps stay where they were."""
    one = trajectory(steps=1)
    sent = replace(one, steps=[copy_with(one.steps[0], **vars(DRAG) | {"behaviour_logprobs": []})])
    pointing = config.model_copy(update={"policy": PolicyConfig(pointing="pointer")})
    assert import_folder(pointing, written(tmp_path / "a", sent)).joined == 1
    with open_reader(pointing.run.dir) as reader:
        [name] = [row.trajectory_id for row in reader.pool()]
        [step] = reader.steps(name)
        assert (step.sampled.patches, step.pointed) == (DRAG.patches, [])
        [planned] = reader.planned_steps([PlannedSample("g", name, 0, 1.0, 1.0, "pool")])
        assert planned.patches == DRAG.patches
        export_run(reader, [name], tmp_path / "b")
    [back] = read_folder(tmp_path / "b")
    assert back.steps[0].sampled.patches == DRAG.patches
    assert content_id(back) == name
