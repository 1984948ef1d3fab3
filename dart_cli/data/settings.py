"""What the processes of a run were started with, compared with the data service's own configuration.

    RunSettings   takes each process's settings as it joins: refuses, tells and stores what differs

Which process reads which key, and what must be equal, stands in dart_cli/config/readers.py. A process that joins
is refused for a key that must be equal and is not, and for one that it does not read, where the value is
neither the data service's nor that of the process that reads it. All else that differs is logged, told to the
process and shown by `dart status`; `config.json` and the database then hold what is used.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bus.errors import ConfigError, ProtocolError, RunDirectoryError
from bus.messages import JoinReply, JoinRequest
from dart_cli.config.readers import Row, Settings, differences, is_overridden, row_of
from dart_cli.config.schema import Config
from dart_cli.config.values import short_value
from dart_cli.runtime.run_dir import cannot_write, read_used, save_used, with_processes

log = logging.getLogger(__name__)

MOST_WORKERS = 4096
"""Names of workers whose differences are kept; the oldest go first."""


class RunSettings:
    """The settings of one run's processes; one event loop owns it."""

    def __init__(
        self, config: Config, save: Callable[[str], None], given: Collection[str] = ()
    ) -> None:
        """`save` stores the configuration that is used, as JSON; the run directory has it as well.

        `given` are the names of what the data service's --set changed.
        """
        self._given = given
        self._run_dir = config.run.dir
        self._own = Settings.of(config)
        self._tree = config.model_dump(mode="json")
        self._save = save
        self._processes = _of_earlier_start(config.run.dir)  # until they join
        self._joined: dict[str, list[str]] = {}  # worker -> what differs, a line each
        self._unequal: dict[str, list[str]] = {}  # the same, of keys that must be equal

    @property
    def used(self) -> str:
        """The configuration that is used, as JSON: each key as the process has it that reads it."""
        return json.dumps(with_processes(self._tree, self._processes))

    def notes(self, workers: Collection[str]) -> list[str]:
        """Return what these processes have other than the data service, a line each."""
        return _of(self._joined, workers)

    def warnings(self, workers: Collection[str]) -> list[str]:
        """Return what these processes have other and must not: a data service with other settings took over."""
        return _of(self._unequal, workers)

    def join(self, request: JoinRequest) -> JoinReply:
        """Take the settings of a process; return a line for each that differs.

        Raises ConfigError where the process cannot take part with them, ProtocolError where they are none,
        DartError where they cannot be stored.
        """
        theirs = Settings(request.settings, request.host, request.folder)
        rows = {
            key: row_of(key)
            for key in differences(theirs, self._own)
            if request.role not in row_of(key).free and not self._is_superseded(request, key)
        }
        if reasons := list(self._refused(request, theirs, rows)):
            more = f" ({len(reasons) - 1} more keys differ)" if len(reasons) > 1 else ""
            log.warning("%s was refused: %s", request.worker, reasons[0])
            raise ConfigError(f"{reasons[0]}{more}")
        self._keep(request, {key: theirs.value(key) for key in rows if _reads(request, key)})
        self._tell(request, theirs, rows)
        return JoinReply(notes=self._joined[request.worker])

    def _is_superseded(self, request: JoinRequest, key: str) -> bool:
        """Return True where a process does not read what its file says, and dart data had a --set for it."""
        is_set = is_overridden(key, request.given)
        return not (_reads(request, key) or is_set) and is_overridden(key, self._given)

    # --- what is refused --------------------------------------------------------------------

    def _refused(
        self, request: JoinRequest, theirs: Settings, rows: Mapping[str, Row]
    ) -> Iterator[str]:
        """Yield why the process cannot take part, a line for each key."""
        if request.is_forced or not request.is_first:
            return
        for key, row in rows.items():
            here = _shown(theirs.value(key))
            if request.role in row.readers:
                if row.equal:
                    yield (
                        f"{key} is {here} for dart {request.role} and {_shown(self._own.value(key))} for dart data: "
                        f"{row.equal}; start both with the same file and the same --set"
                    )
            elif not request.is_supervised and theirs.value(key) not in (used := self._used(key)):
                reader = row.readers[0]
                yield (
                    f"dart {request.role} does not read {key}; dart {reader} does, and has {_shown(used[-1])}, "
                    f"not {here}: start dart {reader} with {key} = {here} (--set, or the same file), or leave "
                    "it out here"
                )

    def _used(self, key: str) -> list[Any]:
        """Return the values of the processes that read a key; the data service's own where none differs."""
        readers = row_of(key).readers
        own = [] if "data" not in readers else [self._own.value(key)]
        others = [
            its["settings"][key]
            for its in self._processes.values()
            if its["role"] in readers and key in its["settings"]
        ]
        return [*others, *own] or [self._own.value(key)]

    # --- what is told and kept --------------------------------------------------------------

    def _tell(self, request: JoinRequest, theirs: Settings, rows: Mapping[str, Row]) -> None:
        """Note what the process has other; log what was not logged of it before."""
        worker = request.worker
        lines = {key: self._line(request, theirs, key) for key in rows}
        for line in lines.values():
            if line not in self._joined.get(worker, ()):
                log.warning("%s", line)
        if len(self._joined) >= MOST_WORKERS and worker not in self._joined:
            oldest = next(iter(self._joined))
            del self._joined[oldest], self._unequal[oldest]
        self._joined[worker] = list(lines.values())
        self._unequal[worker] = [
            line
            for key, line in lines.items()
            if rows[key].equal and _reads(request, key) and not request.is_forced
        ]

    def _line(self, request: JoinRequest, theirs: Settings, key: str) -> str:
        """Return one line about a key that differs."""
        row = row_of(key)
        here, there = theirs.value(key), self._own.value(key)
        says = (
            f"{request.worker} was started {f'without {key}' if here is None else f'with {key} = {short_value(here)}'}, "
            f"dart data {'without it' if there is None else f'with {short_value(there)}'}"
        )
        if not _reads(request, key):
            return f"{says}; dart {request.role} does not read it, dart {row.readers[0]} does"
        if row.equal:
            return f"{says}: {row.equal}; start one of them again"
        return (
            f"{says}{'; each uses its own' if 'data' in row.readers else ', which does not use it'}"
        )

    def _keep(self, request: JoinRequest, read: Mapping[str, Any]) -> None:
        """Store the values of a process that it reads and that differ; log how they were before."""
        worker, role = request.worker, request.role
        left = {
            name: its
            for name, its in self._processes.items()
            if name != worker and (its["role"] != role or name in self._joined)
        }
        now = {**left, worker: {"role": role, "settings": dict(read)}} if read else left
        if now == self._processes:
            return
        used = json.dumps(with_processes(self._tree, now))
        try:
            Config.model_validate_json(used)
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, fault["loc"]))
            raise ProtocolError(
                f"JoinRequest.settings of {worker}: {key}: {fault['msg']}"
            ) from None
        if was := self._processes.get(worker):
            self._log_changes(was["settings"], read, worker)
        try:
            save_used(self._run_dir, self._tree, now)
        except OSError as error:
            raise cannot_write(self._run_dir, error) or error from None
        self._processes = now
        self._save(used)

    def _log_changes(self, before: Mapping[str, Any], now: Mapping[str, Any], worker: str) -> None:
        """Log the settings of a process that were others before it started again."""
        for key, was in before.items():
            if (value := now.get(key, self._own.value(key))) != was:
                log.warning("%s was %s for %s, is %s now", key, _shown(was), worker, _shown(value))


def _shown(value: Any) -> str:
    return "nothing" if value is None else short_value(value)


def _of_earlier_start(run_dir: Path) -> dict[str, dict[str, Any]]:
    try:
        return read_used(run_dir).processes
    except RunDirectoryError:  # nothing is kept yet
        return {}


def _reads(request: JoinRequest, key: str) -> bool:
    return request.role in row_of(key).readers


def _of(lines: Mapping[str, list[str]], workers: Collection[str]) -> list[str]:
    return [line for worker in workers for line in lines.get(worker, ())]
