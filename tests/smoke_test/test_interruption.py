"""A smoke test that is stopped leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.waiting import lives, wait_until

_STARTER = """
    import subprocess, sys, time
    from pathlib import Path
    from dart_cli.smoke_test.interruption import Interruption, interruptible

    folder = Path(sys.argv[1])
    sleeper = "import sys, time; from pathlib import Path; Path(sys.argv[1]).touch(); time.sleep(600)"
    # As the supervisor starts one: a leader of its group, which has started another and hears no SIGTERM.
    child = f'''
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", {sleeper!r}, {str(folder / "inner")!r}], start_new_session=True)
    time.sleep(600)
    '''.replace("\\n    ", "\\n")
    try:
        with interruptible(float(sys.argv[2])):
            subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
            while not (folder / "inner").exists():
                time.sleep(0.01)
            (folder / "ready").touch()
            time.sleep(600)
    except Interruption as stopped:
        print(stopped.why, stopped.is_over)
"""


def _started(folder: Path, seconds: float) -> subprocess.Popen[str]:
    code = textwrap.dedent(_STARTER)
    command = [sys.executable, "-c", code, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGINT, "stopped by SIGINT False"),
        (signal.SIGTERM, "stopped by SIGTERM False"),
        (signal.SIGHUP, "stopped by SIGHUP False"),
        (signal.SIGALRM, "for lack of time True"),  # as the end of the time sends it
    ],
)
def test_a_signal_ends_all_that_was_started_and_the_report_follows(
    number: signal.Signals, why: str, tmp_path: Path
) -> None:
    with _started(tmp_path, 600) as process:
        wait_until((tmp_path / "ready").exists, "its processes")
        below = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        assert len(below) == 2
        process.send_signal(number)
        assert process.communicate()[0].strip() == why
        assert process.returncode == 0
        assert not any(map(lives, below))


def test_under_nohup_a_smoke_test_outlives_its_terminal() -> None:
    code = """
        import signal
        from dart_cli.smoke_test.interruption import interruptible

        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with interruptible(600):
            signal.raise_signal(signal.SIGHUP)
        print("played to its end")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "played to its end\n"


def test_the_end_of_its_time_stops_it(tmp_path: Path) -> None:
    with _started(tmp_path, 0.0) as process:  # over before anything has started
        assert process.communicate()[0].strip() == "for lack of time True"
