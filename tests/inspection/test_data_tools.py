"""`dart data` is the process or a tool; the tools tell what is in the database, beside a live run."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dart_cli.algo.schedule import group_size
from dart_cli.cli.main import main
from dart_cli.config.schema import Config
from dart_cli.data.store.rows import PoolRow
from dart_cli.data.store.writer import Reader, Store, open_reader, open_store
from dart_cli.inspection.curation_plots import draw_all, group_outcome, success_averages
from dart_cli.inspection.explain import explain_trajectory
from dart_cli.inspection.find import find_run, find_subject
from dart_cli.inspection.stats import count
from dart_cli.inspection.text import action_words
from envs.base import content_hash
from tests.data.parts import (
    Clock,
    a_batch,
    ask_lease,
    make_ledger,
    play_group,
    pool_member,
    small_config,
    step_record,
    trained,
    trajectory_end,
)


def run(*arguments: object) -> int:
    """The exit code of `dart data ARGUMENTS`, in this process."""
    with pytest.raises(SystemExit) as exit_:
        main(["data", *map(str, arguments)])
    return int(exit_.value.code or 0)


def story_of(reader: Reader, name: str) -> str:
    """All sentences of a trajectory's story."""
    return "\n".join(event.text for event in explain_trajectory(reader, find_subject(reader, name)))


class Played:
    """A run in which every fate occurs; its store is open for writing all the while."""

    def __init__(self, config: Config, store: Store) -> None:
        self.config, self.store, self.clock = config, store, Clock()
        row, steps, images = pool_member("x" + "ab" * 16, task_id="mini/click", source="oracle")
        store.add_pool_member(row, steps, images)
        store.add_pool_member(*_renamed(row, steps, images, "mini/popup"))
        ledger = self.ledger = make_ledger(config, store, self.clock)
        self.mixed = play_group(ledger, ["pass", "fail", "fail", "pass"], steps=3)
        self.helped = play_group(ledger, ["fail"] * 4)
        self.solved = play_group(ledger, ["pass"] * 4)
        assert a_batch(ledger.next_batch(0)).batch_id == 1
        self.invalid = self._play_one(0, "invalid")
        self.expired = ask_lease(ledger, 1).trajectory_id
        ledger.step(step_record(self.expired, 0))
        self.clock.now += config.data.lease_s + 1
        ledger.take_back_expired()
        self.stale = self._play_one(2, "fail", version=1)
        self.clock.now += 5
        ledger.batch_trained(trained(1, version=9))
        self.playing = ask_lease(ledger, 3).trajectory_id
        store.commit()

    def _play_one(self, slot: int, outcome: Any, version: int = 0) -> str:
        lease = ask_lease(self.ledger, slot)
        self.ledger.step(step_record(lease.trajectory_id, 0, version=version))
        self.ledger.end(trajectory_end(lease.trajectory_id, 1, outcome))
        return lease.trajectory_id


def _renamed(row: PoolRow, steps: Any, images: Any, task_id: str) -> Any:
    name = "x" + "ac" * 16
    moved = [replace(step, trajectory_id=name) for step in steps]
    return replace(row, trajectory_id=name, task_id=task_id), moved, images


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    config = small_config(
        tmp_path_factory.mktemp("runs") / "run",
        pool_ratio=0.25,
        high_entropy=0.8,
        max_staleness=4,
        pool_online=True,
    )
    with open_store(config.run.dir) as store:
        yield Played(config, store)


@pytest.fixture
def reader(played: Played) -> Iterator[Reader]:
    with open_reader(played.config.run.dir) as reader:
        yield reader


# --- the process or a tool ------------------------------------------------------------------


def test_a_configuration_starts_the_process_and_a_command_is_a_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("c.toml", "ls"):
        (tmp_path / name).write_text('[run]\ndir = "run"\n')
    for arguments in (
        ["c.toml", "--dry-run"],
        ["--dry-run", "c.toml"],
        ["--set", "run.seed=3", "c.toml", "--dry-run"],
        ["serve", "c.toml", "--dry-run"],
        ["./ls", "--dry-run"],
    ):
        assert run(*arguments) == 0, arguments
        assert "nothing was started" in capsys.readouterr().out
    assert run("ls", "c.toml") == 2
    assert "no run in run yet" in capsys.readouterr().err


def test_help_teaches_the_process_and_the_tools(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("dart data CONFIG", "./ls", "CONFIG | COMMAND", "collect", "export", "why"):
        assert text in out
    assert run("c.toml", "--help") == 0
    assert "--dry-run" in capsys.readouterr().out
    for tool in ("ls", "show", "stats", "why", "collect", "export", "import"):
        assert run(tool, "--help") == 0
        assert f"dart data {tool}" in capsys.readouterr().out.split("Example:")[1]


def test_a_misspelt_command_is_told_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("shwo", "g000001-00") == 2
    assert "did you mean `dart data show`" in " ".join(capsys.readouterr().err.split())
    assert run("nothing.toml") == 2
    assert "no such file: nothing.toml" in capsys.readouterr().err


# --- which run, which trajectory ------------------------------------------------------------


def test_a_run_is_named_by_directory_or_configuration_or_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for at, name in enumerate(("old", "new")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.db").touch()
        os.utime(tmp_path / "runs" / name / "run.db", (at, at))
    (tmp_path / "c.toml").write_text('[run]\ndir = "runs/old"\n')
    assert find_run(Path("runs/old")) == find_run(Path("c.toml")) == Path("runs/old")
    assert find_run(None) == Path("runs/new")
    for name in ("run.db-shm", "run.db-wal"):  # somebody reads the old one
        (tmp_path / "runs" / "old" / name).touch()
    (tmp_path / "runs" / "old" / "run.db-shm").write_bytes(b"index")
    assert find_run(None) == Path("runs/new")
    (tmp_path / "runs" / "old" / "run.db-wal").write_bytes(b"frames")  # now it is written to
    assert find_run(None) == Path("runs/old")


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        ("g1-9", "group g000001 has g000001-00 to g000001-03"),
        ("g000001", "group g000001 has g000001-00 to g000001-03"),
        ("g999999-00", "its groups go from g000001 to g0"),
        ("what", "ids look like g0"),
        ("xzz", "`dart data ls --pool` lists its members"),
        ("xa", "2 of its members begin with it"),
    ],
)
def test_a_wrong_id_is_one_line_with_the_nearest_cure(
    wrong: str, cure: str, played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    for tool in ("show", "why"):
        assert run(tool, wrong, "--run", played.config.run.dir) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert cure in err


@pytest.mark.parametrize(
    "words", [("show", "\udcff", "--run"), ("ls", "--reason", "\udcff"), ("ls", "--limit", 2**64)]
)
def test_a_value_that_no_database_can_hold_is_one_line(
    words: tuple[object, ...], played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words, played.config.run.dir) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- ls, show, stats ------------------------------------------------------------------------


def test_ls_lists_what_fits(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*arguments: object) -> list[str]:
        assert run("ls", played.config.run.dir, "--json", *arguments) == 0
        return [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]

    everything = ids()
    assert everything == [row.id for row in played.store.trajectories()]
    assert ids("--limit", 2) == everything[-2:]
    assert ids("--reason", "all_success") == [f"{played.solved}-0{i}" for i in range(4)]
    assert ids("--state", "trained", "--outcome", "pass") == [
        f"{played.mixed}-00",
        f"{played.mixed}-03",
    ]
    tasks = {row.task_id for row in played.store.groups()}
    assert sorted(each for task in tasks for each in ids("--task", task)) == sorted(everything)
    assert run("ls", played.config.run.dir, "--task", "mini/clik") == 2
    assert "did you mean 'mini/click'" in capsys.readouterr().err


def test_ls_is_a_table_that_says_what_it_leaves_out(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ls", played.config.run.dir, "--limit", 3) == 0
    out = capsys.readouterr().out
    assert played.playing in out
    assert f"{played.mixed}-00" not in out
    assert "the newest 3 that fit; --limit shows more" in out
    assert run("ls", played.config.run.dir, "--pool") == 0
    pool = capsys.readouterr().out
    assert "oracle" in pool
    assert "unknown" in pool
    assert f"{played.solved}-00" in pool
    assert run("ls", played.config.run.dir, "--pool", "--outcome", "pass") == 2


def test_show_tells_each_step(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{played.mixed}-00"
    assert run("show", name, "--run", played.config.run.dir, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    steps = played.store.steps(name)
    assert [step["text"] for step in told["trajectory_steps"]] == [step.text for step in steps]
    assert [step["logprob"] for step in told["trajectory_steps"]] == pytest.approx(
        [sum(step.behaviour_logprobs) / 3 for step in steps]
    )
    assert (told["outcome"], told["state"], told["pool"]["source"]) == ("pass", "trained", "online")
    assert run("show", name, "--run", played.config.run.dir) == 0
    page = capsys.readouterr().out
    assert "click 1,2" in page
    assert "pass after 3 steps" in page


def test_actions_are_short_words() -> None:
    assert action_words({"kind": "click", "x": 3, "y": 4, "button": "left"}) == "click 3,4"
    assert action_words({"kind": "click", "x": 3, "y": 4, "button": "right"}) == (
        "click 3,4 button right"
    )
    assert action_words({"kind": "type", "text": "a b"}) == "type text a b"
    assert action_words({"kind": "done"}) == "done"


def test_show_draws_every_screen_of_a_trajectory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        lease = ask_lease(ledger, 0)
        for number, colour in enumerate(("red", "green", "blue")):
            file = io.BytesIO()
            Image.new("RGB", (168, 168), colour).save(file, "PNG")
            ledger.step(step_record(lease.trajectory_id, number, image=file.getvalue()))
        end = trajectory_end(lease.trajectory_id, 3)
        ledger.end(end.model_copy(update={"screenshot": file.getvalue()}))
        store.commit()
        film = tmp_path / "film.png"
        assert run("show", lease.trajectory_id, "--run", config.run.dir, "--film", film) == 0
        with Image.open(film) as drawn:
            colours = {colour for _, colour in drawn.convert("RGB").getcolors(2**24) or []}
        assert {(255, 0, 0), (0, 128, 0), (0, 0, 255)} <= colours
        store.remove_screenshots(10**6, 10**6)
        store.commit()
        assert run("show", lease.trajectory_id, "--run", config.run.dir, "--film", film) == 2
        assert "data.max_gb" in capsys.readouterr().err


def test_stats_add_up(played: Played, reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats", played.config.run.dir, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == count(reader)
    rows = reader.trajectories()
    assert sum(entry["number"] for entry in told["trajectories"]) == len(rows)
    assert sum(fared["trajectories"] for fared in told["tasks"].values()) == len(rows)
    for outcome in ("pass", "fail", "invalid"):
        assert sum(fared[outcome] for fared in told["tasks"].values()) == sum(
            row.outcome == outcome for row in rows
        )
    assert sum(n for sources in told["pool"].values() for n in sources.values()) == len(
        reader.pool()
    )
    assert told["tokens"] == sum(
        len(step.token_ids)
        for name in [*(row.id for row in rows), "x" + "ab" * 16, "x" + "ac" * 16]
        for step in reader.steps(name)
    )
    assert run("stats", played.config.run.dir) == 0
    assert "MiB on disk" in capsys.readouterr().out


def test_a_run_that_holds_a_pool_alone_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(tmp_path / "run") as store:
        store.add_pool_member(*pool_member("x" + "ab" * 16))
    assert run("stats", tmp_path / "run") == 0
    assert "1 oracle" in capsys.readouterr().out
    assert run("why", "xab", "--run", tmp_path / "run") == 0
    assert "came into the pool" in capsys.readouterr().out


# --- why ------------------------------------------------------------------------------------


def test_the_story_of_one_that_is_trained_on(played: Played, reader: Reader) -> None:
    told = story_of(reader, f"{played.mixed}-00")
    assert "leased to env-0, slot 0" in told
    assert "step 2: Action: click(start_box='(1,2)') -> click 1,2 (v0, rollout-0" in told
    assert "pass after 3 steps: because (stopped: done)" in told
    assert f"its group {played.mixed} is over: 2 pass, 2 fail; ready for a batch" in told
    assert "part of batch 1: formed when the trainer was at v0" in told
    assert "batch 1 is trained: weights v9" in told


def test_each_step_is_used_or_left_out_with_its_numbers(played: Played, reader: Reader) -> None:
    rows = [row for row in reader.batch_rows(1) if row.reason != "pool"]
    assert {row.reason for row in rows} == {"mixed", "low_entropy"}
    for row in rows:
        story = explain_trajectory(reader, find_subject(reader, row.trajectory_id))
        [told] = [e.text for e in story if e.text.startswith(f"step {row.step} is ")]
        assert f"{row.entropy:.4f} nats" in told
        if row.weight:
            assert f"advantage {row.advantage:+.3f}, weight 1" in told
            assert "sampled by weights v0, 0 versions behind" in told
        else:
            group = row.trajectory_id.rpartition("-")[0]
            kept = [r.entropy for r in rows if r.weight and r.trajectory_id.startswith(group)]
            assert f"the least of those kept in its group has {min(kept):.4f} nats" in told


def test_a_pool_member_and_the_group_it_joined_tell_of_each_other(
    played: Played, reader: Reader
) -> None:
    member = reader.groups_by_id([played.helped])[played.helped].pool_member
    assert member is not None
    assert f"{member} of the pool joined the group" in story_of(reader, f"{played.helped}-00")
    told = story_of(reader, member)
    assert "source oracle" in told
    assert "log-probabilities unknown" in told
    assert f"part of batch 1 with the all-fail group {played.helped}" in told
    assert "step 0 is trained on (pool)" in told


def test_what_is_dropped_tells_the_rule_and_the_numbers(played: Played, reader: Reader) -> None:
    assert "all 4 valid members passed" in story_of(reader, f"{played.solved}-01")
    assert "dropped (invalid): its environment or evaluator broke" in story_of(
        reader, played.invalid
    )
    assert "no step and no heartbeat for data.lease_s = 60.0 s" in story_of(reader, played.expired)
    told = story_of(reader, played.stale)
    assert (
        "oldest token was sampled by v1, the trainer was at v9: 8 versions behind, "
        "data.max_staleness = 4" in told
    )
    assert story_of(reader, played.playing).endswith("it is leased now")


@pytest.mark.parametrize(
    ("pool_ratio", "why"),
    [
        (0.0, "data.pool_ratio = 0, so no success of the pool joins"),
        (0.1, "one success among 5 would be a larger share than data.pool_ratio = 0.1"),
        (0.25, "the pool had no success of mini/click"),
    ],
)
def test_an_all_fail_group_tells_why_the_pool_did_not_help(
    pool_ratio: float, why: str, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "run", pool_ratio=pool_ratio)
    config = config.model_copy(
        update={"env": config.env.model_copy(update={"tasks": ["mini/click"]})}
    )
    with open_store(config.run.dir) as store:
        group = play_group(make_ledger(config, store), ["fail"] * 4)
        assert f"all 4 valid members failed: equal rewards teach nothing; {why}" in story_of(
            store, f"{group}-00"
        )


def test_every_story_ends_with_what_became_of_it(played: Played, reader: Reader) -> None:
    ends = {
        "trained": "is trained: weights",
        "dropped": ("dropped", "equal rewards", "versions behind"),
        "finished": "waits for",
        "leased": "it is leased now",
    }
    for row in reader.trajectories():
        assert any(
            word in story_of(reader, row.id)
            for word in ([ends[row.state]] if isinstance(ends[row.state], str) else ends[row.state])
        ), row


def test_why_prints_moments_or_json(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{played.mixed}-00"
    assert run("why", name, "--run", played.config.run.dir) == 0
    assert "1970-01-01" in capsys.readouterr().out
    assert run("why", name, "--run", played.config.run.dir, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["id"] == name
    assert told["story"][0]["numbers"]["worker"] == "env-0"


# --- out and in -----------------------------------------------------------------------------


def test_export_and_import_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.model_validate(
        {"run": {"dir": tmp_path / "run"}, "rollout": {"engine": "scripted"}}
    )
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/other"\n[rollout]\nengine = "scripted"\n')
    file = io.BytesIO()
    Image.new("RGB", (28, 28)).save(file, "PNG")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for slot in range(2):
            lease = ask_lease(ledger, slot)
            ledger.step(step_record(lease.trajectory_id, 0, image=file.getvalue()))
            ledger.end(trajectory_end(lease.trajectory_id, 1, "pass" if slot else "fail"))
        store.commit()
        assert content_hash(file.getvalue()) in store.screenshots([content_hash(file.getvalue())])
        assert run("export", config.run.dir, tmp_path / "out") == 0  # beside a live writer
    assert "2 trajectories, 2 steps" in capsys.readouterr().out
    assert run("export", config.run.dir, tmp_path / "none", "--pool", "--outcome", "fail") == 2
    assert "--pool exports successes alone" in capsys.readouterr().err
    assert run("import", path, tmp_path / "out", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["joined"], told["not_passed"]) == (1, 1)
    assert run("import", path, tmp_path / "nowhere") == 2
    assert "no such folder" in capsys.readouterr().err


# --- draw -----------------------------------------------------------------------------------


def test_a_run_is_drawn_beside_it_or_where_it_is_asked_for(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, options in (
        (played.config.run.dir / "pictures", []),
        (tmp_path / "new" / "here", ["--out", tmp_path / "new" / "here"]),
    ):
        assert run("draw", played.config.run.dir, *options) == 0
        paths = [folder / f"{name}.png" for name in ("fates", "sizes", "lengths", "entropies")]
        assert capsys.readouterr().out.split() == [str(path) for path in paths]
        for path in paths:
            with Image.open(path) as image:
                assert len(image.convert("RGB").getcolors(maxcolors=1_000_000) or []) > 10


def test_a_folder_for_pictures_that_cannot_be_written_is_one_line(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("draw", played.config.run.dir, "--out", tmp_path / "file") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "cannot be written: File exists" in err


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
            assert len(draw_all(reader, tmp_path / "pictures")) == 4


def test_each_group_that_is_over_has_one_fate(played: Played, reader: Reader) -> None:
    fates = {group.id: group_outcome(group) for group in reader.groups()}
    assert fates[played.mixed] == "mixed"
    assert fates[played.helped] == "pool"
    assert fates[played.solved] == "all_success"
    assert fates[played.stale.rpartition("-")[0]] == "other"
    assert fates[played.playing.rpartition("-")[0]] is None


def test_a_run_without_a_group_that_is_over_or_of_another_dart_is_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store, Clock())
        ask_lease(ledger, 0)
        store.commit()
        assert run("draw", config.run.dir) == 2
        assert "no group is over yet" in capsys.readouterr().err
        play_group(ledger, ["pass"] * 4)
        store.begin_run(3, '{"data": {"of_another_dart": 1}}', [])
    assert run("draw", config.run.dir) == 2
    assert "its configuration is of another version" in capsys.readouterr().err


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
    assert known[groups[0].id] is None
    assert [group.size for group in groups] == [group_size(known[g.id], 8, 2) for g in groups]
    assert {group.size for group in groups} >= {8, 2}
