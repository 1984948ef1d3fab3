"""`dart data draw` draws what curation decided, also of a live run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from dart_cli.algo.task_sampling import group_size
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.reader import Reader
from dart_cli.inspection.pictures import (
    COLOURS,
    MOST_PANELS,
    draw_all,
    draw_lengths,
    group_outcome,
    success_averages,
)
from dart_cli.view.site import stylesheet
from tests.data.parts import (
    Clock,
    ask_lease,
    make_ledger,
    next_batch,
    play_group,
    small_config,
    step_record,
    trajectory_end,
)
from tests.inspection.parts import PlayedRun, run


def test_a_run_is_drawn_beside_it_or_where_it_is_asked_for(
    run_content: PlayedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, options in (
        (run_content.config.run.dir / "pictures", []),
        (tmp_path / "new" / "here", ["--out", tmp_path / "new" / "here"]),
    ):
        assert run("draw", run_content.config.run.dir, *options) == 0
        paths = [folder / f"{name}.png" for name in ("fates", "lengths", "entropies")]
        assert capsys.readouterr().out.split() == [str(path) for path in paths]
        for path in paths:
            with Image.open(path) as image:
                assert len(image.convert("RGB").getcolors(maxcolors=1_000_000) or []) > 10


def test_a_folder_for_pictures_that_cannot_be_written_is_one_line(
    run_content: PlayedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("draw", run_content.config.run.dir, "--out", tmp_path / "file") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "file: is a file; name a folder" in err


def test_a_live_run_is_drawn_while_groups_begin_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store, Clock())

        def play_on() -> None:
            play_group(ledger, ["pass"] * 4)
            store.commit()

        def live(read: Any) -> Any:
            def then_more(reader: Reader, *words: Any, **options: Any) -> Any:
                rows = read(reader, *words, **options)
                play_on()
                return rows

            return then_more

        play_on()
        with open_reader(config.run.dir) as reader, monkeypatch.context() as patch:
            for name in ("groups", "trajectories"):
                patch.setattr(Reader, name, live(getattr(Reader, name)))
            assert len(draw_all(reader, tmp_path / "pictures")) == 3


def test_each_group_that_is_over_has_one_outcome(run_content: PlayedRun, reader: Reader) -> None:
    outcomes = {group.id: group_outcome(group) for group in reader.groups()}
    assert outcomes[run_content.mixed] == "mixed"
    assert outcomes[run_content.helped] == "pool"
    assert outcomes[run_content.solved] == "all_success"
    assert outcomes[run_content.stale.rpartition("-")[0]] == "other"
    assert outcomes[run_content.playing.rpartition("-")[0]] is None


def test_a_group_of_one_was_compared_with_earlier_trajectories(tmp_path: Path) -> None:
    settings = {"group_size": 1, "advantage": "task_baseline", "groups_per_batch": 1}
    config = small_config(tmp_path / "run", **settings)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store, Clock())
        play_group(ledger, ["pass"])
        next_batch(ledger, 0)
        assert [group_outcome(group) for group in store.groups()] == ["baseline"]


def test_a_run_without_a_group_that_is_over_is_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store, Clock())
        ask_lease(ledger, 0)
        store.commit()
        assert run("draw", config.run.dir) == 2
        assert "no group is over yet" in capsys.readouterr().err


def test_the_sizes_that_are_drawn_are_those_the_rule_gives_for_what_is_drawn(
    tmp_path: Path,
) -> None:
    """The averages are computed again from the rows, the sizes are those of the ledger."""
    config = small_config(tmp_path / "run", dynamic_number=True, group_size=8)
    clock = Clock()
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store, clock)
        for number in range(20):
            clock.now += 1
            leases = [ask_lease(ledger, 0)]
            leases += [ask_lease(ledger, slot) for slot in range(1, store.groups()[-1].size)]
            clock.now += 1
            for index, lease in enumerate(leases):
                ledger.step(step_record(lease.trajectory_id, 0))
                passed = number > 3 or index == 0
                ledger.end(trajectory_end(lease.trajectory_id, 1, "pass" if passed else "fail"))
        store.commit()
    with open_reader(config.run.dir) as reader:
        groups = reader.groups()
        known = success_averages(groups, reader.trajectories())
        assert tmp_path / "sizes.png" in draw_all(reader, tmp_path)
    assert known[groups[0].id] is None
    assert [group.size for group in groups] == [group_size(known[g.id], 8, 2) for g in groups]
    assert {group.size for group in groups} >= {8, 2}


def test_each_task_has_its_panel_of_lengths_or_the_picture_counts_them(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        play_group(make_ledger(config, store, Clock()), ["pass"] * 4)
        [group], [row, *_] = store.groups(), store.trajectories()

    def drawn(tasks: int) -> list[str]:
        groups = [replace(group, id=f"g{i}", number=i, task_id=f"t{i:02}") for i in range(tasks)]
        rows = [replace(row, id=f"g{i}-00", group_id=f"g{i}") for i in range(tasks)]
        figure = Figure()
        draw_lengths(figure, groups, rows)
        panels = [axes.get_title("left") for axes in figure.axes if axes.get_visible()]
        return [*filter(None, [figure.get_suptitle()]), *panels]

    assert drawn(MOST_PANELS) == [f"t{i:02}" for i in range(MOST_PANELS)]
    assert f"{MOST_PANELS} of {MOST_PANELS + 1} tasks" in drawn(MOST_PANELS + 1)[0]


def test_the_pages_have_the_colours_of_the_pictures() -> None:
    light = stylesheet().partition("@media")[0]
    assert re.findall(r"--v\d: (#\w+)", light) == list(COLOURS)
