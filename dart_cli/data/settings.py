"""The settings that the processes of a run were started with, compared with the data service's configuration.

    RunSettings   gets each process's settings when it joins, and refuses, reports and stores the differences

dart_cli/config/readers.py lists which process reads which key, and which keys must be equal. A process that
joins is refused in two cases: a key that must be equal differs, or a key that the process does not read has
neither the data service's value nor the value of a process that reads it. All other differences are logged,
reported to the process and shown by `dart status`; `config.json` and the database then have the values that
are used.
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
"""Most workers whose differences are in memory; those that joined first are forgotten first."""


class RunSettings:
    """The settings of one run's processes; one event loop owns it."""

    def __init__(
        self, config: Config, save: Callable[[str], None], set_keys: Collection[str] = ()
    ) -> None:
        """Compare with `config`; `save` stores the configuration that is used, as JSON.

        `set_keys` are the keys that the data service's --set changed.
        """
        self._set_keys = set_keys
        self._run_dir = config.run.dir
        self._own = Settings.of(config)
        self._tree = config.model_dump(mode="json")
        self._save = save
        self._processes = _earlier_processes(config.run.dir)  # until they join again
        self._joined: dict[str, list[str]] = {}  # worker -> its differences, a line each
        self._unequal: dict[str, list[str]] = {}  # the lines of keys that must be equal

    @property
    def used(self) -> str:
        """The configuration that is used, as JSON: each key has the value of the process that reads it."""
        return json.dumps(with_processes(self._tree, self._processes))

    def notes(self, workers: Collection[str]) -> list[str]:
        """Return the differences of these processes from the data service, a line each."""
        return _lines_of(self._joined, workers)

    def warnings(self, workers: Collection[str]) -> list[str]:
        """Return the differences of these processes in keys that must be equal, a line each.

        They arise if a data service with other settings takes over while the processes run.
        """
        return _lines_of(self._unequal, workers)

    def join(self, request: JoinRequest) -> JoinReply:
        """Note the settings of a process that joins, and return a line for each difference.

        Raises ConfigError if the process cannot take part with them, ProtocolError if they are no valid
        configuration, DartError if they cannot be stored.
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
        self._store(request, {key: theirs.value(key) for key in rows if _reads(request, key)})
        self._report(request, theirs, rows)
        return JoinReply(notes=self._joined[request.worker])

    def _is_superseded(self, request: JoinRequest, key: str) -> bool:
        """Return True if the process neither reads nor set a key that the data service's --set changed."""
        is_set = is_overridden(key, request.set_keys)
        return not (_reads(request, key) or is_set) and is_overridden(key, self._set_keys)

    # --- what is refused --------------------------------------------------------------------

    def _refused(
        self, request: JoinRequest, theirs: Settings, rows: Mapping[str, Row]
    ) -> Iterator[str]:
        """Yield the reasons why the process cannot take part, a line for each key."""
        if request.is_forced or not request.is_first:
            return
        for key, row in rows.items():
            here = _text(theirs.value(key))
            if request.role in row.readers:
                if row.equal:
                    yield (
                        f"{key} is {here} for dart {request.role} and {_text(self._own.value(key))} for dart data: "
                        f"{row.equal}; start both with the same file and the same --set"
                    )
            elif not request.is_supervised and theirs.value(key) not in (used := self._used(key)):
                reader = row.readers[0]
                yield (
                    f"dart {request.role} does not read {key}; dart {reader} does, and has {_text(used[-1])}, "
                    f"not {here}: start dart {reader} with {key} = {here} (--set, or the same file), or leave "
                    "it out here"
                )

    def _used(self, key: str) -> list[Any]:
        """Return the values that the processes which read a key have; the data service's if none differs."""
        readers = row_of(key).readers
        own = [] if "data" not in readers else [self._own.value(key)]
        others = [
            process["settings"][key]
            for process in self._processes.values()
            if process["role"] in readers and key in process["settings"]
        ]
        return [*others, *own] or [self._own.value(key)]

    # --- what is reported and stored --------------------------------------------------------

    def _report(self, request: JoinRequest, theirs: Settings, rows: Mapping[str, Row]) -> None:
        """Note the differences of a process, and log those that were not logged before."""
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
        """Return the line about a key that differs."""
        row = row_of(key)
        here, there = theirs.value(key), self._own.value(key)
        difference = (
            f"{request.worker} was started {f'without {key}' if here is None else f'with {key} = {short_value(here)}'}, "
            f"dart data {'without it' if there is None else f'with {short_value(there)}'}"
        )
        if not _reads(request, key):
            return f"{difference}; dart {request.role} does not read it, dart {row.readers[0]} does"
        if row.equal:
            return f"{difference}: {row.equal}; start one of them again"
        return f"{difference}{'; each uses its own' if 'data' in row.readers else ', which does not use it'}"

    def _store(self, request: JoinRequest, values: Mapping[str, Any]) -> None:
        """Store the `values` in which a process differs from the data service; log what changed since before.

        Raises ProtocolError if the result is no valid configuration, DartError if it cannot be written.
        """
        worker, role = request.worker, request.role
        # 1. Replace the process. Drop its role's processes of an earlier start that have not joined again.
        processes = {
            name: process
            for name, process in self._processes.items()
            if name != worker and (process["role"] != role or name in self._joined)
        }
        if values:
            processes[worker] = {"role": role, "settings": dict(values)}
        if processes == self._processes:
            return
        # 2. Check that the result is a configuration.
        used = json.dumps(with_processes(self._tree, processes))
        try:
            Config.model_validate_json(used)
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, fault["loc"]))
            raise ProtocolError(
                f"JoinRequest.settings of {worker}: {key}: {fault['msg']}"
            ) from None
        # 3. Store it.
        if before := self._processes.get(worker):
            self._log_changes(before["settings"], values, worker)
        try:
            save_used(self._run_dir, self._tree, processes)
        except OSError as error:
            raise cannot_write(self._run_dir, error) or error from None
        self._processes = processes
        self._save(used)

    def _log_changes(self, before: Mapping[str, Any], now: Mapping[str, Any], worker: str) -> None:
        """Log the settings of a process that have changed since it started before."""
        for key, old in before.items():
            if (new := now.get(key, self._own.value(key))) != old:
                log.warning("%s was %s for %s, is %s now", key, _text(old), worker, _text(new))


def _text(value: Any) -> str:
    return "nothing" if value is None else short_value(value)


def _earlier_processes(run_dir: Path) -> dict[str, dict[str, Any]]:
    try:
        return read_used(run_dir).processes
    except RunDirectoryError:  # nothing is stored yet
        return {}


def _reads(request: JoinRequest, key: str) -> bool:
    return request.role in row_of(key).readers


def _lines_of(lines: Mapping[str, list[str]], workers: Collection[str]) -> list[str]:
    return [line for worker in workers for line in lines.get(worker, ())]
