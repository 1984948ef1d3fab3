"""An environment in a process of its own costs its slot alone, whatever it does to itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import EnvError, NoOracleError, TaskError
from dart_cli.config.schema import EnvConfig
from dart_cli.env.async_env import AsyncEnv, Deadlines, make_async_env
from dart_cli.env.carriers import IsolatedEnv, read
from dart_cli.env.child import MOST_BLOB, pack, read_from
from dart_cli.env.episode import play_episode
from envs.contract.actions import Click
from envs.contract.registry import find_task, make_env
from tests.env.parts import Memory, Says, action_spec, lease
from tests.env.unruly_suite import SUITE, UnrulySuite
from tests.waiting import PATIENCE_S, lives, until


def isolated(*, deadline_s: float = 30.0) -> AsyncEnv:
    return AsyncEnv(IsolatedEnv(SUITE, {}, "env-0/0"), Deadlines(30.0, deadline_s, deadline_s))


def pid_of(env: AsyncEnv) -> int | None:
    """Of its process; None while there is none."""
    assert isinstance(env.carrier, IsolatedEnv)
    return env.carrier.pid


async def play(env: AsyncEnv, kind: str) -> tuple[str, str, str]:
    """(outcome, stop reason, reason) of an episode with the click that passes."""
    task = UnrulySuite.tasks[f"unruly/{kind}"]
    end = await play_episode(env, lease(), task, Says("click(30,30)"), Memory(), action_spec())
    return end.outcome, end.stop_reason, end.reason


async def test_whatever_it_does_to_itself_the_slot_plays_on_with_a_fresh_one() -> None:
    env = isolated(deadline_s=1.5)
    for kind, message in (
        ("step-raise", "step: ZeroDivisionError: a bug of the environment"),
        ("step-exit", "step: SystemExit: 3"),
        ("evaluate-none", "evaluate must return a Verdict (envs.contract.base), got None"),
        ("step-die", "its process was ended by SIGKILL"),
        ("step-spin", "no answer to step in 1.5 s"),
        ("evaluate-hang", "no answer to evaluate in 1.5 s"),
    ):
        outcome, stop, reason = await play(env, kind)
        assert (outcome, stop) == ("invalid", "environment"), kind
        assert message in reason
        before = pid_of(env)
        await env.renew()
        assert pid_of(env) is None
        assert before is None or not lives(before)
        assert (await play(env, "well"))[:2] == ("pass", "done")
    await env.close()
    await env.close()


async def test_what_it_has_started_ends_with_it_when_it_hangs_and_when_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("UNRULY_PID", str(pid_file))
    env = isolated(deadline_s=1.5)
    assert "no answer to step" in (await play(env, "step-daemon"))[2]
    hung_with = int(pid_file.read_text())
    assert (await play(env, "reset-daemon"))[0] == "pass"
    closed_with = int(pid_file.read_text())
    assert closed_with != hung_with
    await env.close()
    await until(lambda: not lives(hung_with) and not lives(closed_with))


async def test_it_plays_as_one_in_a_thread_does() -> None:
    task, plain = find_task("mini", "mini/popup"), make_env("mini", encoding="jpeg")
    env = make_async_env(
        EnvConfig(suite="mini", options={"encoding": "jpeg"}, isolation="process"), "env-0/0"
    )
    screen, info = plain.reset(seed=5, options={"task": task})
    assert await env.reset(task, 5) == (screen, info["instruction"])
    assert await env.evaluate_start() == plain.evaluate()
    for _ in range(2):
        action, hint = await env.solve()
        assert (action, hint) == (plain.oracle_action(), plain.oracle_hint())  # type: ignore[attr-defined]
        screen, _, terminated, truncated, _ = plain.step(action)
        stepped = await env.step(action)
        assert (stepped.observation, stepped.terminated, stepped.truncated) == (
            *(screen, terminated, truncated),
        )
    assert await env.evaluate() == plain.evaluate()
    await env.close()


async def test_a_process_sends_the_texts_that_were_asked_for() -> None:
    suite = "tests.env.telling_suite:TellingSuite"
    observe = ["screenshot", "terminal"]
    for isolation in ("process", "thread"):
        config = EnvConfig(suite=suite, observe=observe, isolation=isolation)  # type: ignore[arg-type]
        env = make_async_env(config, "env-0/0")
        screen, _ = await env.reset(find_task(suite, "telling/one"), 1)
        assert screen.texts == {"terminal": "told: terminal ä"}
        await env.close()


async def test_where_there_is_no_oracle_the_error_says_so() -> None:
    suite = "tests.env.telling_suite:TellingSuite"
    env = make_async_env(EnvConfig(suite=suite, isolation="process"), "env-0/0")
    await env.reset(find_task(suite, "telling/one"), 0)
    with pytest.raises(NoOracleError):
        await env.solve()
    await env.close()


async def test_a_cancelled_call_leaves_no_process_and_no_half_answer() -> None:
    env = isolated()
    await env.reset(UnrulySuite.tasks["unruly/step-hang"], 0)
    pid = pid_of(env)
    assert pid is not None
    call = asyncio.create_task(env.step(Click(x=1, y=1)))
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.sleep(0.05)
    call.cancel()  # while the process is being ended
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not lives(pid)
    assert (await play(env, "well"))[0] == "pass"
    await env.close()


async def test_it_ends_with_all_it_started_when_the_slots_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    daemon = tmp_path / "daemon"
    monkeypatch.setenv("UNRULY_PID", str(daemon))
    script = (
        "import asyncio, os, signal, sys\n"
        "from tests.env.test_isolated import isolated, pid_of, UnrulySuite\n"
        "async def main():\n"
        "    env = isolated()\n"
        "    await env.reset(UnrulySuite.tasks['unruly/reset-daemon'], 0)\n"
        "    open(sys.argv[1], 'w').write(str(pid_of(env)))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    survivors = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", script, str(pid_file)],
        timeout=PATIENCE_S,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert survivors.returncode == -signal.SIGKILL
    pids = [int(file.read_text()) for file in (pid_file, daemon)]
    await until(lambda: not any(map(lives, pids)))


def test_it_ends_with_all_it_started_when_its_answer_is_no_longer_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = tmp_path / "pid"
    monkeypatch.setenv("UNRULY_PID", str(daemon))
    about = {
        "suite": SUITE,
        "options": {},
        "observe": [],
        "screens": "png",
    }
    reset = {"call": "reset", "task": "unruly/reset-daemon", "seed": 0}
    child = subprocess.Popen(
        [sys.executable, "-m", "dart_cli.env.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin:
        child.stdin.write(pack(about) + pack(reset))
        child.stdin.flush()
        assert read_from(child.stdout) is not None
        child.stdout.close()  # as when the slot was killed while a call was out
        child.stdin.write(pack({"call": "evaluate", "at_start": False}))
        child.stdin.flush()
        child.wait()
    asyncio.run(until(lambda: not lives(int(daemon.read_text()))))


async def test_options_must_be_plain_values() -> None:
    with pytest.raises(TaskError, match="for another process"):
        IsolatedEnv("mini", {"size": object()}, "x")


async def test_a_frame_beyond_the_bound_is_refused_before_it_is_read() -> None:
    stream = asyncio.StreamReader()
    stream.feed_data((10).to_bytes(4, "big") + (MOST_BLOB + 1).to_bytes(4, "big"))
    with pytest.raises(EnvError, match="a frame of 10"):
        await read(stream)
    stream.feed_data(pack({"a": 1}, b"xyz"))
    assert await read(stream) == ({"a": 1}, b"xyz")


def test_the_process_of_this_test_has_no_children_left() -> None:
    """The tests above leave none behind."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children if lives(int(pid))]
    assert not [command for command in commands if b"dart_cli.env.child" in command]


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_an_oracle_needs_no_hint(isolation: str) -> None:
    env = make_async_env(EnvConfig(suite=SUITE, isolation=isolation), "env-0/0")  # type: ignore[arg-type]
    await env.reset(find_task(SUITE, "unruly/well"), 1)
    assert await env.solve() == (Click(x=1, y=1), "")
    await env.close()
