"""Hooks and fixtures of all tests.

Each `async def` test runs in a new event loop. Property tests have no time limit for an example, since on a
busy machine a limit would fail tests whose promise holds. If CI is in the environment they draw the same
examples each time, so that a failure comes from the change and not from the draw.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.progress import pytest_timeout_set_timer  # noqa: F401 - pytest finds the hook here

settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("patient")


def pytest_configure() -> None:
    """Collect garbage as often as `dart` does, and give each pytest-xdist worker its own TMPDIR.

    Tests look at the files that remain in TMPDIR. SIGHUP is reset, since under nohup `dart` would ignore a
    closed terminal.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.set_threshold(20_000)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    folder = Path(tempfile.gettempdir()) / f"dart-{os.getpid()}-{worker}"
    folder.mkdir()
    folder.chmod(0o1777)  # like /tmp: applications that play as another user clean up there
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # At the process's end, after multiprocessing has removed a folder of its own in it (at -100).
    Finalize(None, shutil.rmtree, [folder], {"ignore_errors": True}, exitpriority=-200)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device of tests/devices.py. The pretended one replaces the GPU while the test runs."""
    if request.param == "apart":
        from tests.apart import pretend  # it loads torch

        pretend(monkeypatch)
    name: str = request.param
    return name


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print how many tests were skipped, by reason; write their files to pytest's cache, for .ci/skips."""
    reasons = {  # by test: each pytest-xdist worker reports the modules that are skipped as a whole
        (report.nodeid, report.longrepr[1]): report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    }
    counts = Counter(reasons.values())
    files: dict[str, list[str]] = {reason: [] for reason, _ in counts.most_common()}
    for (test, _), reason in reasons.items():
        files[reason].append(test.partition("::")[0])
    if (cache := getattr(config, "cache", None)) is not None:  # None with -p no:cacheprovider
        cache.set("dart/skips", files)
    if counts:
        terminalreporter.section("skipped, by reason")
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"{count:5d}  {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests with asyncio.run; leave all others to pytest."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True, scope="module")
def _leaves_no_process_group() -> Iterator[None]:
    """A model in bfloat16 makes a process group of one, which is its process's from then on."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family(model_type) -> a small random model folder of that class, built once."""
    from scripts.small_models import build

    @cache
    def folder(model_type: str) -> Path:
        return build(model_type, tmp_path_factory.mktemp("models") / model_type)

    return folder


@pytest.fixture(scope="session")
def pointer_folder(
    family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """pointer_folder("builtin:tiny" or a model_type) -> that model with a pointer head, built once."""
    from dart_cli.config.model_folder import BUILTIN
    from dart_cli.policy.pointer_folder import add_pointer

    @cache
    def folder(name: str) -> Path:
        out = tmp_path_factory.mktemp("models") / "with-pointer"
        add_pointer(BUILTIN[name] if name in BUILTIN else family(name), out, seed=3)
        return out

    return folder
