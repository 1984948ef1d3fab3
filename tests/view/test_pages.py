"""The viewer's pages, over a real socket, beside a store that is open for writing."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.messages import Judgement, StepMismatch, StepValue, VersionSpan
from dart_cli.data.store.open import open_store
from dart_cli.data.workers import process_row
from dart_cli.view.site import ROWS
from envs.contract.blobs import content_hash
from tests.data import parts
from tests.data.parts import (
    MIXED,
    a_batch,
    ask_lease,
    batch_trained,
    heartbeat,
    make_ledger,
    next_batch,
    one_task,
    play,
    play_group,
    play_pointing,
    pointing_config,
    pool_member,
    small_config,
    trajectory_end,
)
from tests.inspection.parts import PlayedRun
from tests.view.parts import Bones, Server, play_shown, png, serving

LISTS = ("/", "/tasks", "/groups", "/trajectories")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedRun]:
    config = small_config(
        tmp_path_factory.mktemp("runs") / "run", pool_ratio=0.25, high_entropy=0.8, max_staleness=4
    )
    with open_store(config.run.dir) as store:
        yield PlayedRun(config, store)


@pytest.fixture(scope="module")
def server(played: PlayedRun) -> Iterator[Server]:
    with serving(played.config.run.dir) as server:
        yield server


# --- what the pages show --------------------------------------------------------------------


def test_every_link_of_every_page_leads_to_a_page(server: Server) -> None:
    seen, waiting = set(), ["/"]
    while waiting:
        path = waiting.pop().partition("#")[0] or "/"
        if path in seen:
            continue
        seen.add(path)
        answer = server.get(path)
        assert answer.status == 200, path
        if answer.headers["content-type"].startswith("text/html"):
            waiting += [link for link in Bones.of(answer.text).links if not link.startswith("?")]
    assert {*LISTS, "/view.css"} <= seen
    assert any(path.startswith("/trajectories/x") for path in seen)  # a member of the pool
    assert len(seen) > 40


def test_the_run_page_counts_stages_and_reasons(server: Server, played: PlayedRun) -> None:
    text = Bones.of(server.page("/")).text
    states = [row.state for row in played.store.trajectories()]
    for state in ("leased", "finished", "trained", "dropped"):
        assert f"{state} {states.count(state)}" in text
    for reason in ("all_success 4", "invalid 1", "lease_expired 1", "stale "):
        assert reason in text
    assert "success, share of episodes by policy version" in server.page("/")
    assert "loss" in text


def test_patches_stand_in_the_table_of_tokens_and_over_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "picture", lambda *_: png(300, 200))
    config = pointing_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        name = play_pointing(make_ledger(config, store))[0]
    with serving(config.run.dir) as server:
        page = server.page(f"/trajectories/{name}")
    text = Bones.of(page).text
    assert "3 patch 5 row 1, column 2 4.000 -3.500" in " ".join(text.split())
    assert "7 patch 0 row 0, column 0 2.000 -0.333" in " ".join(text.split())
    assert page.count('class="region"') == 2  # one map for each pointer
    assert '<path class="heat" fill-opacity="0.7" d="M2 1h1v1h-1z"/>' in page
    assert 'class="candidate"' in page
    assert '<g transform="scale(100 100)">' in page
    assert "250, 150 score 0.5" in " ".join(text.split())


@pytest.mark.parametrize(
    "query",
    [
        {"state": "trained", "outcome": "pass"},
        {"reason": "all_success"},
        {"task": "mini/click"},
        {"version": "1"},
        {"state": "leased"},
        {"task": "mini/click", "outcome": "invalid", "version": "3"},
    ],
)
def test_trajectories_are_filtered(
    query: dict[str, str], server: Server, played: PlayedRun
) -> None:
    tasks = {group.id: group.task_id for group in played.store.groups()}
    expected = {
        row.id
        for row in played.store.trajectories()
        if query.get("state") in (None, row.state)
        and query.get("outcome") in (None, row.outcome)
        and query.get("reason") in (None, row.reason)
        and query.get("task") in (None, tasks[row.group_id])
        and (
            "version" not in query
            or (
                row.oldest_version is not None
                and row.newest_version is not None
                and row.oldest_version <= int(query["version"]) <= row.newest_version
            )
        )
    }
    words = "&".join(f"{key}={value}" for key, value in query.items())
    links = Bones.of(server.page(f"/trajectories?{words}")).links
    found = {link.rpartition("/")[2] for link in links if link.startswith("/trajectories/")}
    assert found == expected


def test_pages_of_a_long_list_hold_each_trajectory_once(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", max_open_groups=100)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for _ in range(ROWS // 2):
            play_group(ledger, ["pass"] * 4, steps=1)
        store.commit()
        with serving(config.run.dir) as server:
            found = []
            for number in range(1, 3):
                links = Bones.of(server.page(f"/trajectories?page={number}&outcome=pass")).links
                found += [link for link in links if link.startswith("/trajectories/g")]
            newest_first = [f"/trajectories/{row.id}" for row in reversed(store.trajectories())]
            assert found == newest_first
            assert server.get("/trajectories?page=3").status == 400


def test_a_trajectory_shows_why_each_step_was_kept_or_left_out(
    server: Server, played: PlayedRun
) -> None:
    for row in played.store.batch_rows(1):
        text = Bones.of(server.page(f"/trajectories/{row.trajectory_id}")).text
        if row.weight:
            assert f"kept batch 1, advantage {row.advantage:+.3f} , weight 1" in text
        else:
            assert "left out batch 1, low_entropy the policy was most certain here" in text
    assert "dropped all_success" in Bones.of(server.page(f"/trajectories/{played.solved}-01")).text
    assert "all 4 valid members passed" in server.page(f"/trajectories/{played.solved}-01")


def test_a_step_that_was_trained_on_shows_how_far_trainer_and_engine_were_apart(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store, serving(config.run.dir) as server:
        ledger = make_ledger(config, store)
        for _ in range(config.data.groups_per_batch):
            group = play_group(ledger, MIXED)
        name = f"{group}-01"
        batch = a_batch(next_batch(ledger, 0))
        gap = StepMismatch(trajectory_id=name, step=1, mean=-0.0125, largest=0.5)
        told = batch_trained(batch.batch_id).model_copy(update={"mismatches": [gap]})
        assert ledger.batch_trained(told).accepted
        store.commit()
        steps = store.sample_rows(name)
        assert [(row.gap_mean, row.gap_largest) for row in steps] == [(None, None), (-0.0125, 0.5)]
        text = Bones.of(server.page(f"/trajectories/{name}")).text
        assert text.count("log-prob difference") == 1
        assert "log-prob difference -0.013, at most 0.500" in text
        assert "trainer minus engine" in text  # its history, too


def test_a_trajectory_without_a_group_shows_what_was_expected_of_it(tmp_path: Path) -> None:
    stream = {"group_size": 1, "advantage": "step_baseline"}
    config = one_task(tmp_path / "run", **stream)
    with open_store(config.run.dir) as store, serving(config.run.dir) as server:
        ledger = make_ledger(config, store)
        lease = play(ledger, 0, "fail")
        a_batch(next_batch(ledger, 0))
        store.commit()
        text = Bones.of(server.page(f"/trajectories/{lease.trajectory_id}")).text
        assert text.count("(expected reward 0.5)") == 2


def test_what_a_critic_expected_stands_beside_what_the_baseline_did(tmp_path: Path) -> None:
    config = one_task(tmp_path / "run", group_size=1, advantage="step_baseline")
    with open_store(config.run.dir) as store, serving(config.run.dir) as server:
        ledger = make_ledger(config, store)
        name = play(ledger, 0, "fail").trajectory_id
        batch = a_batch(next_batch(ledger, 0))
        values = [
            StepValue(
                group_id=each.group_id,
                trajectory_id=name,
                step=each.step,
                value=0.25 + each.step / 2,
                advantage=-0.125,
            )
            for each in batch.samples
        ]
        ledger.batch_trained(batch_trained(batch.batch_id).model_copy(update={"values": values}))
        store.commit()
        text = Bones.of(server.page(f"/trajectories/{name}")).text
        for value in ("0.25", "0.75"):
            assert f"(expected reward 0.5 by its baseline, by the critic {value} )" in text
        assert text.count("advantage -0.125") >= 2
        assert "(expected reward 0.500 by its task's baseline, 0.750 by the critic)" in text


def test_a_trajectory_and_its_group_show_the_instruction_that_the_policy_got(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store, serving(config.run.dir) as server:
        ledger = make_ledger(config, store)
        name = play_shown(ledger, 0, instruction='click the "teal" button')
        store.commit()
        for page in (f"/trajectories/{name}", f"/groups/{name.partition('-')[0]}"):
            assert "click the &#34;teal&#34; button" in server.page(page)


def test_what_a_judge_said_stands_beside_the_verdict(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store, serving(config.run.dir) as server:
        name = play_shown(make_ledger(config, store), 0)
        said = Judgement(
            judge="eyes#1a", use="check", outcome="fail", score=0.0, reason="<b>no</b>"
        )
        store.add_judgement(name, said, 0.0)
        store.commit()
        page = server.page(f"/trajectories/{name}")
        assert "judge eyes#1a (beside the evaluator)" in page
        assert "&lt;b&gt;no&lt;/b&gt;" in page


def test_what_the_policy_read_beside_the_screenshot_is_folded_below_it(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store, serving(config.run.dir) as server:
        ledger = make_ledger(config, store)
        name = play_shown(ledger, 0, steps=1, observed_text="Terminal:\n<b>$ ls")
        plain = play_shown(ledger, 1, steps=1)
        store.commit()
        page = server.page(f"/trajectories/{name}")
        assert "<summary>text beside the screenshot, 17 characters</summary>" in page
        assert "<pre>Terminal:\n&lt;b&gt;$ ls</pre>" in page
        assert "beside the screenshot" not in server.page(f"/trajectories/{plain}")


def test_the_action_is_drawn_where_it_was(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    actions = [
        {"kind": "click", "x": 31, "y": 77, "button": "left"},
        {"kind": "drag", "path": [[3, 5], [9, 11]]},
        {"kind": "scroll", "x": 8, "y": 9, "dx": 0, "dy": -2},
        {"kind": "type", "text": "words"},
        {"x": 1},
        {"kind": "click", "x": "</svg>", "y": 2},
        None,
    ]
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        pages = []
        with serving(config.run.dir) as server:
            for slot, action in enumerate(actions):
                name = play_shown(ledger, slot, steps=1, action=action)
                store.commit()
                page = server.page(f"/trajectories/{name}")
                assert 'viewBox="0 0 320 200"' in page
                pages.append(page)
    click, drag, scroll, *others = pages
    assert '<circle class="mark" cx="31" cy="77" r="10"/>' in click
    assert '<path class="mark" d="M3 5L9 11"/><circle class="halo" cx="9" cy="11"' in drag
    assert '<path class="mark" d="M8 9L8 -21"/>' in scroll
    assert not any('class="mark"' in page for page in others)


def test_tokens_are_marked_with_the_weights_that_sampled_them(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        spans = [
            VersionSpan(version=4, start=0, end=1),
            VersionSpan(version=5, start=1, end=3),
        ]
        name = play_shown(
            ledger,
            0,
            steps=1,
            version_spans=spans,
            behaviour_logprobs=[-0.5, -1.0, -3.0],
            entropies=[0.25, 1.0, 2.0],
        )
        store.commit()
        with serving(config.run.dir) as server:
            text = Bones.of(server.page(f"/trajectories/{name}")).text
    assert "0–1 v4 0.250 -0.500 -0.500 1–3 v5 1.500 -2.000 -3.000 mean 1.083 -1.500" in text


def test_a_screenshot_is_served_as_the_image_it_is_and_nothing_else_is(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    page = b"<html><script>alert(1)</script></html>"
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        play_shown(ledger, 0)
        play_shown(ledger, 1, screenshot=page, image_hashes=[content_hash(page)], steps=1)
        store.commit()
        with serving(config.run.dir) as server:
            answer = server.get(f"/screenshots/{content_hash(png())}")
            assert (answer.status, answer.body) == (200, png())
            assert answer.headers["content-type"] == "image/png"
            assert "immutable" in answer.headers["cache-control"]
            assert server.get(f"/screenshots/{content_hash(page)}").status == 404


# --- live, empty, gone ----------------------------------------------------------------------


def test_a_live_run_is_loaded_again_and_shows_what_is_new(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store, serving(config.run.dir) as server:
        ledger = make_ledger(config, store)
        assert "not live" in Bones.of(server.page("/")).text
        store.save_processes([process_row(heartbeat("env-0"), time.time())])
        lease = ask_lease(ledger, 0)
        store.commit()
        for path in ("/", f"/trajectories/{lease.trajectory_id}", f"/groups/{lease.group_id}"):
            page = server.page(path)
            assert '<meta http-equiv="refresh"' in page
            assert ">pause<" in page
            assert '<meta http-equiv="refresh"' not in server.page(f"{path}?live=off")
        done = play_shown(ledger, 1)
        assert server.get(f"/trajectories/{done}").status == 404  # not committed yet
        store.commit()
        assert server.get(f"/trajectories/{done}").status == 200
        assert done in server.page("/")


def test_a_page_that_is_paused_keeps_its_axis(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store, serving(config.run.dir) as server:
        play_shown(make_ledger(config, store), 0)
        store.save_processes([process_row(heartbeat("env-0"), time.time())])
        store.commit()
        links = Bones.of(server.page("/?x=minutes&to=9")).links
        assert "?x=minutes&to=9&live=off" in links
        paused = server.page("/?x=minutes&to=9&live=off")
        assert "?x=minutes&to=9" in Bones.of(paused).links
        assert '<input type="hidden" name="live" value="off">' in paused


def test_processes_that_ended_in_order_are_told_apart_from_those_that_did_not(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        play_shown(make_ledger(config, store), 0)
        (tmp_path / "run" / "workers").mkdir()
        for name, left in {
            "env-0": "",
            "env-1": "ended",
            "env-2": "killed by signal 9",
            "rollout-0": "no room",
        }.items():
            (tmp_path / "run" / "workers" / f"{name}.lock").write_text(f"4194303\n{left}\n")
        names = ("env-0", "env-1", "env-2", "rollout-0")
        rows = [process_row(heartbeat(name), time.time() - 60) for name in names]
        store.save_processes(
            [
                *rows,
                process_row(heartbeat("train", state="stopping"), time.time() - 60),
                process_row(heartbeat("env-3"), time.time()),
            ]
        )
        store.commit()
        with serving(config.run.dir) as server:
            page = server.page("/").partition("<h2>Processes</h2>")[2]
    states = dict(re.findall(r"<tr><td>([\w-]+)</td><td>here</td><td><span [^>]+>([^<]+)<", page))
    assert states == {
        "env-0": "lost",
        "env-1": "ended",
        "env-2": "killed by signal 9",
        "env-3": "ready",
        "rollout-0": "failed",
        "train": "ended",
    }


@pytest.mark.parametrize("path", LISTS)
def test_a_run_in_which_nothing_happened_yet_has_its_pages(path: str, tmp_path: Path) -> None:
    config = small_config(tmp_path / "begun")
    with open_store(config.run.dir) as store:
        make_ledger(config, store)
        with serving(config.run.dir) as server:
            text = Bones.of(server.page(path)).text
            assert "othing was played yet" in text or "no match" in text
            assert server.get("/trajectories/g000001-00").status == 404
    with open_store(tmp_path / "pool") as store:
        store.add_pool_member(*pool_member("x" + "ab" * 16))
        store.commit()
        with serving(tmp_path / "pool") as server:
            assert "not started yet" in server.page(path)
            assert "source oracle" in server.page("/trajectories/x" + "ab" * 16)


def test_a_run_that_was_moved_away_is_reported_and_found_again(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        play(make_ledger(config, store), 0)
    with serving(config.run.dir) as server:
        config.run.dir.rename(tmp_path / "run.1")
        answer = server.get("/")
        assert answer.status == 503
        assert "no run in" in answer.text
        shutil.move(tmp_path / "run.1", config.run.dir)
        server.page("/")


def test_a_run_of_another_version_s_configuration_is_shown(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        groups = [play_group(ledger, ["fail"] * 4), play_group(ledger, ["pass"] * 4)]
        store.begin_run(3, json.dumps({"of_another": "dart"}), [])
        store.commit()
        with serving(config.run.dir) as server:
            for path in (*LISTS, *(f"/trajectories/{group}-00" for group in groups)):
                server.page(path)


# --- what does not exist --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "cure"),
    [
        ("/trajectories/g000001-99", "group g000001 has g000001-00 to g000001-03"),
        ("/trajectories/what", "ids look like g0"),
        ("/trajectories/xzz", "lists its members"),
        ("/groups/g999999", "its groups go from g000001 to g0"),
        ("/tasks/mini/clik", "did you mean 'mini/click'"),
        ("/screenshots/" + "0" * 32, "no screenshot"),
        ("/nothing", "start at the first page"),
    ],
)
def test_what_does_not_exist_is_404_with_the_nearest_cure(
    path: str, cure: str, server: Server
) -> None:
    answer = server.get(path)
    assert answer.status == 404
    assert cure in Bones.of(answer.text).text


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("state=traind", "did you mean 'trained'"),
        ("outcome=win", "want one of pass, fail, invalid"),
        ("version=-1", "want a whole number from 0 on"),
        ("version=" + "9" * 40, "want a whole number from 0 on"),
        ("page=0", "want a whole number from 1 on"),
        ("page=99", "the last page is"),
        ("task=%00", "there is no such task"),
        ("reason=%ed%b3%bf", "there is no such reason"),
    ],
)
def test_a_query_for_what_cannot_be_is_400_with_what_can(
    words: str, cure: str, server: Server
) -> None:
    answer = server.get(f"/trajectories?{words}")
    assert answer.status == 400
    assert cure in Bones.of(answer.text).text


@pytest.mark.parametrize(
    "path",
    [
        "/../run.db",
        "/../../../../etc/passwd",
        "/run.db",
        "/config.json",
        "/screenshots/../run.db",
        "/screenshots/..%2f..%2frun.db",
        "/screenshots/%2e%2e/run.db",
        "/screenshots/..%5crun.db",
        "/trajectories/../../run.db",
        "/trajectories/%2e%2e%2frun.db",
        "/trajectories/%00",
        "/tasks/../../../../etc/passwd",
        "/tasks//etc/passwd",
        "/groups/....//run.db",
        "//etc/passwd",
        "/static/view.css",
        "/view.css/../server.py",
        "/templates/base.html",
    ],
)
def test_no_path_leads_out_of_the_pages(path: str, server: Server) -> None:
    answer = server.get(path)
    assert answer.status == 404
    assert b"SQLite" not in answer.body
    assert b"root:" not in answer.body


def test_the_page_of_a_trajectory_shows_what_its_application_reported(
    server: Server, played: PlayedRun
) -> None:
    html = server.page(f"/trajectories/{played.stale}")
    assert html.count("TypeError: &lt;b&gt;x&lt;/b&gt; is undefined") == 2  # final screen, history


def test_a_member_of_the_pool_is_found_by_its_id(server: Server, played: PlayedRun) -> None:
    member = played.store.pool()[0]
    text = Bones.of(server.page(f"/trajectories/{member.trajectory_id}")).text
    assert f"in the pool {member.source}" in text


def test_what_the_end_of_a_run_cancelled_is_not_among_the_newest(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        group = play_group(ledger, ["pass"] * 4)
        lease = ask_lease(ledger, 0)
        ledger.end(trajectory_end(lease.trajectory_id, 0, "invalid", "cancelled"))
        store.commit()
        with serving(config.run.dir) as server:
            for path in ("/", "/trajectories"):
                links = Bones.of(server.page(path)).links
                assert f"/trajectories/{group}-00" in links
                assert f"/trajectories/{lease.trajectory_id}" not in links
            assert "/trajectories?reason=cancelled" in links
            links = Bones.of(server.page("/trajectories?reason=cancelled")).links
            assert f"/trajectories/{lease.trajectory_id}" in links
