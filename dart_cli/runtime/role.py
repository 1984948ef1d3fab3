"""The life of one role's process: its start, its signals, its end.

    run_role         runs a role's coroutine from start to clean end, and returns the exit code
    take_gpus        shows this process only its own share of the GPUs
    how_started      returns whether `dart up` started this process, and with which options
    stop_signals     returns the signals that ask a process to end
    finishing        delays the end of the process for work that would be lost
    end_with_parent  ends this process once the `dart up` that started it is gone
    limit_threads    limits the CPU threads of torch and BLAS
    grow_segments    lets torch's allocator extend its segments of GPU memory

The first SIGINT, SIGTERM or SIGHUP sets the stop event. A role also sets it when the data service reports
that the run is over. From then on the role has `GRACE_S` to end cleanly, or more if it must finish something
(`finishing`). The second signal, or the end of that time, ends the process at once. In all cases nothing
acknowledged is lost. SIGUSR1 dumps all stacks to the log (logs.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

from bus.endpoints import make_private_dir
from bus.errors import DartError, RunDirectoryError
from bus.messages import Role
from dart_cli.config.devices import VISIBLE, gpus_of
from dart_cli.config.schema import Config
from dart_cli.runtime.liveness import when_orphaned
from dart_cli.runtime.logs import ignore_dumps, logging_to, stacks_to
from dart_cli.runtime.run_dir import (
    Place,
    cannot_write,
    claim,
    leave_end,
    leave_error,
    refuse_another_run,
    save_config,
)
from dart_cli.runtime.streams import keep_going, say_at_once, say_error

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Seconds in which a process must end after it was asked to."""

LAST_WORK_S = 900.0
"""Most seconds by which `finishing` delays the end: for an update of a large model and a checkpoint of some
100 GB."""

PARENT_VARIABLE = "DART_PARENT_PID"
"""The environment variable in which `dart up` passes its pid to its children."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with the settings of torch's allocator; the second and third are older names."""


@dataclass(frozen=True)
class _LastWork:
    """Work that delays the end of this process."""

    what: str  # the rest of a sentence: "train is still ..."
    within_s: float  # most seconds after the process was asked to end


_finishing: list[_LastWork] = []


@dataclass
class Start:
    """The way in which this process was started."""

    is_supervised: bool = False  # whether `dart up` started it
    is_forced: bool = False  # whether --force was given
    set_keys: tuple[str, ...] = ()  # names of the keys that --set changed


_start = Start()

Main = Callable[[str, asyncio.Event], Awaitable[None]]
"""A role's coroutine: (worker name, stop event); it returns when the run is over or the event is set."""


def run_role(
    role: Role,
    config: Config,
    main: Main,
    *,
    worker: str = "",
    threads: int = 1,
    force: bool = False,
    overrides: Sequence[str] = (),
) -> int:
    """Run one role until the run is over or a signal ends it, and return the exit code.

    The code is 0 after a clean end, 2 for a mistake of the user, 1 for a fault. An error is one line on
    stderr, and complete in the log. `threads` limits the CPU threads of torch and BLAS. `force` continues a
    run even if suite or model have changed. `overrides` are the arguments of --set that `config` includes.
    """
    # SIGUSR1 is ignored before another process can learn this one's pid.
    ignore_dumps()
    keep_going()
    limit_threads(threads)
    _start.is_supervised, _start.is_forced = end_with_parent(), force
    _start.set_keys = tuple(override.partition("=")[0].strip() for override in overrides)
    try:
        make_private_dir(config.run.dir)
        # The data service compares when it saves the configuration, and logs what has changed.
        if role != "data" and not force:
            refuse_another_run(config)
        with claim(config, role, worker) as name:
            try:
                take_gpus(config, role, name)
                return _logged(role, config, main, name, force=force)
            except (DartError, OSError) as error:
                leave_error(config.run.dir, name, str(_as_dart(error, config.run.dir)))
                raise
    except (DartError, OSError) as error:
        ours = _as_dart(error, config.run.dir)
        say_error(str(ours))
        return ours.exit_code


def how_started() -> Start:
    """Return how this process was started; by hand and without options if `run_role` was not called."""
    return replace(_start)


def take_gpus(config: Config, role: Role, name: str) -> None:
    """Set CUDA_VISIBLE_DEVICES so that this process sees only its own share of the GPUs (see `gpus_of`).

    Call it before torch is loaded; ranks inherit the setting. Raises ConfigError if there is no GPU for this
    process.
    """
    if mine := gpus_of(config, role, name):
        if VISIBLE not in os.environ:
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's numbers
        os.environ[VISIBLE] = mine


def _logged(role: Role, config: Config, main: Main, name: str, *, force: bool) -> int:
    """Run the role as worker `name` with its log, and return the exit code.

    Raises the error that prevents the start.
    """
    with logging_to(config.run.dir, name) as log_file, stacks_to(log_file):
        logger.info("%s starts, pid %d, run %s", name, os.getpid(), config.run.dir)
        if visible := os.environ.get(VISIBLE):
            logger.info("it sees GPU %s", visible)
        if role == "data":
            try:
                save_config(config, force=force)
            except (DartError, OSError):
                _record(name)
                raise
        return _guarded(main, name, log_file, config.run.dir)


def stop_signals() -> dict[signal.Signals, str]:
    """Return the signals that ask a process to end, each with its description for the log.

    Under `nohup`, which ignores SIGHUP, that signal is not included.
    """
    signals = {
        signal.SIGINT: "Ctrl-C, or SIGINT",
        signal.SIGTERM: "SIGTERM",
        signal.SIGHUP: "SIGHUP, which is sent when a terminal is closed",
    }
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        del signals[signal.SIGHUP]
    return signals


@contextlib.contextmanager
def finishing(what: str, within_s: float | None = None) -> Iterator[None]:
    """Delay the end of this process while the block runs, by at most `within_s`, by default `LAST_WORK_S`.

    `what` completes the sentence "train is still ...".
    """
    work = _LastWork(what, LAST_WORK_S if within_s is None else within_s)
    _finishing.append(work)
    try:
        yield
    finally:
        _finishing.remove(work)


def limit_threads(threads: int) -> None:
    """Limit the CPU threads of libraries that are not loaded yet, unless the user has set a limit."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def grow_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch extend its segments of GPU memory, here and in child processes, unless the user has set this.

    A trainer calls it before it loads torch, because packs of many lengths leave gaps between segments of
    fixed sizes. vLLM must not: its memory pools and its handles for other processes need memory that is
    mapped in one piece.
    """
    if not any(name in environment for name in _ALLOCATOR):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"


def end_with_parent() -> bool:
    """Send SIGTERM to this process once the `dart up` that started it is gone.

    Return True if a `dart up` started this process; otherwise nothing is done.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        when_orphaned(int(parent), lambda: os.kill(os.getpid(), signal.SIGTERM))
    return bool(parent)


def _guarded(main: Main, name: str, log_file: Path, run_dir: Path) -> int:
    """Run `main` and return the exit code. An error becomes one line on stderr and a record in the log."""
    stopping = _Stopping(name, run_dir)
    before, threading.excepthook = threading.excepthook, _record_thread
    try:
        asyncio.run(stopping.watch(main))
    except Exception as error:  # noqa: BLE001 - it is printed and recorded, and ends the process
        _record(name)
        cause = cannot_write(run_dir, error) if isinstance(error, OSError) else error
        if isinstance(cause, DartError):
            text, code = str(cause), cause.exit_code
        else:
            text = f"{name} broke: {type(error).__name__}: {error}; the traceback is in {log_file}"
            code = DartError.exit_code
        leave_error(run_dir, name, text)
        say_error(text)
        return code
    finally:
        stopping.forget()
        threading.excepthook = before
    logger.info("%s ended", name)
    leave_end(run_dir, name)
    return 0


def _as_dart(error: DartError | OSError, run_dir: Path) -> DartError:
    """Return an error that prevents the start as a DartError, with the place and the fix."""
    if isinstance(error, DartError):
        return error
    return cannot_write(run_dir, error) or DartError(f"{run_dir} cannot be used: {error}")


def _record_thread(arguments: threading.ExceptHookArgs) -> None:
    """Log an error that ended a thread of a library: one line, with the traceback in the log file."""
    if arguments.exc_type is SystemExit or arguments.exc_value is None:
        return
    where = arguments.thread.name if arguments.thread else "a thread"
    error = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
    logger.error("%s ended with an error", where, exc_info=error)


def _record(name: str) -> None:
    """Write the current exception with its traceback to the log file, but not to the terminal."""
    record = logger.makeRecord(
        logger.name, logging.ERROR, __file__, 0, "%s ends with an error", (name,), sys.exc_info()
    )
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


class _Stopping:
    """Sets the stop event at a signal, and ensures that the process then ends."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self._name = name
        self._run_dir = run_dir
        self._place = Place(run_dir)
        self._event: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline: threading.Timer | None = None
        self._signals = stop_signals()
        self._is_signalled = False
        self._asked_at = 0.0  # monotonic seconds of the first request to end
        self._is_delayed = False  # the last check of the deadline found unfinished work
        self._announced = ""  # the unfinished work that was last printed
        self._moved: RunDirectoryError | None = None

    async def watch(self, main: Main) -> None:
        """Run `main` with a stop event that the signals set.

        Once it is set, by a signal or by `main`, the time to end runs.
        """
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        # A handler of loop.add_signal_handler would never run while a long call blocks the loop.
        for number in self._signals:
            signal.signal(number, self._on_signal)
        stopping = asyncio.create_task(self._begin_at(self._event))
        task = asyncio.current_task()
        assert task is not None
        end_watch = self._place.watch(partial(self._on_move, self._loop, task))
        try:
            await main(self._name, self._event)
        except BaseException:
            if error := self._moved or self._place.moved():  # it caused any other error
                raise error from None
            raise
        finally:
            end_watch.set()
            stopping.cancel()
        if self._moved is not None:
            raise self._moved

    async def _begin_at(self, event: asyncio.Event) -> None:
        """Begin the time to end when the role itself sets the stop event because the run is over."""
        await event.wait()
        self._begin()

    def _on_move(
        self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None], error: RunDirectoryError
    ) -> None:
        """Cancel `task`, because what it still writes to a directory that was moved would be lost."""
        self._moved = error

        def end() -> None:
            say_at_once(f"error: {error}")
            os._exit(error.exit_code)

        self.forget()
        self._deadline = threading.Timer(GRACE_S, end)
        self._deadline.daemon = True
        self._deadline.start()
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(task.cancel)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Set the stop event at the first signal, and end the process at the second."""
        if self._is_signalled:
            os._exit(128 + number)
        # This comes before any output: a reader may send the second signal at once.
        self._is_signalled = True
        self._begin()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop, signal.Signals(number))
        say_at_once(f"{self._name}: stopping; a second signal stops at once")

    def _begin(self) -> None:
        """Begin the time in which the process must end, unless it has begun."""
        if self._deadline is None:
            self._asked_at = time.monotonic()
            self._end_in(GRACE_S)

    def _stop(self, number: signal.Signals) -> None:
        """Set the stop event, and log the reason, because the terminal may be gone."""
        if self._event is not None:
            self._event.set()
        logger.info("%s was asked to end by %s", self._name, self._signals[number])

    def _end_in(self, seconds: float) -> None:
        self._deadline = threading.Timer(seconds, self._too_late)
        self._deadline.daemon = True
        self._deadline.start()

    def _too_late(self) -> None:
        """Delay the end again if work is unfinished, else end the process at once."""
        waited_s = time.monotonic() - self._asked_at
        work = _finishing[-1] if _finishing else None
        if work is not None and waited_s < work.within_s:
            # `dart up` needs the line again and again, a person only once.
            if work.what != self._announced or not os.isatty(2):
                self._announced = work.what
                say_at_once(
                    f"progress: {self._name} is still {work.what}; a second signal stops at once"
                )
            self._is_delayed = True
            self._end_in(GRACE_S / 2)
        elif self._is_delayed:
            # That work is finished now; the rest gets the usual time.
            self._is_delayed = False
            self._end_in(GRACE_S)
        else:
            doing = f", and is still {work.what}" if work is not None else ""
            text = f"did not end within {waited_s:.0f} s{doing}; it is ended at once"
            say_at_once(f"{self._name}: {text}")
            leave_error(self._run_dir, self._name, text)
            os._exit(1)

    def forget(self) -> None:
        """Cancel the deadline of a process that ended in time."""
        if self._deadline is not None:
            self._deadline.cancel()
