"""Performs the set-up steps of a task, `config` and `postconfig`, which bring a guest into its initial state.

    EpisodeContext   folders, screen and evaluator process of an episode
    prepare          performs steps in turn; raises EnvError that names a step that fails

Steps that need only the guest's server are performed here, all others (browser tabs, log-ins, ...) by
OSWorld's own SetupController (evaluator_process.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.errors import EnvError
from envs.suites.osworld.downloads import Downloads
from envs.suites.osworld.evaluator_process import EvaluatorProcess, ScoredGuest
from envs.suites.osworld.guest import Executed, Guest, RefusalError
from envs.tools.taskfile import SetupStep

logger = logging.getLogger(__name__)

STEP_DEADLINE_S = 300.0
LONGEST_SLEEP_S = 120.0
AGAIN_S = 0.3  # pause between tries of a command that is repeated `until` a condition holds
MOST_REFUSALS = 5  # refusals of such a command after which it fails, as in OSWorld

MAY_FAIL = frozenset(
    {"launch", "execute", "command", "activate_window", "close_window", "change_wallpaper"}
)
"""Steps that the guest may refuse: OSWorld's SetupController logs the refusal and goes on."""


@dataclass(frozen=True)
class EpisodeContext:
    """The parts on this host that set-up and evaluation of an episode use."""

    folder: Path  # of this episode only
    downloads: Downloads  # kept between episodes
    screen: tuple[int, int]  # size of the guest's screen, pixels
    password: str  # of the guest's user
    evaluator: EvaluatorProcess

    def scored(self, guest: Guest) -> ScoredGuest:
        """Return the facts about the episode that OSWorld's functions need."""
        return ScoredGuest(guest.address, self.folder, self.screen, self.password)


def prepare(
    steps: Iterable[SetupStep], guest: Guest, context: EpisodeContext, *, lenient: bool = False
) -> None:
    """Perform the steps. Raises EnvError that names a step that failed.

    As in OSWorld, a refusal by the guest is an error, except for the steps in MAY_FAIL, where it is only
    logged. With `lenient`, before an evaluation, all refusals are only logged: the policy may have closed the
    window that is to be activated.
    """
    for number, step in enumerate(steps):
        perform = STEPS.get(step.type)
        try:
            if perform is None:
                context.evaluator.prepare(step, context.scored(guest))
            else:
                perform(guest, context, **step.parameters)
        except RefusalError as error:
            if not lenient and step.type not in MAY_FAIL:
                raise EnvError(f"set-up step {number} ({step.type}): {error}") from error
            when = "before the evaluation" if lenient else "of the set-up"
            logger.warning("step %d (%s) %s is skipped: %s", number, step.type, when, error)
        except (EnvError, TypeError, KeyError, OSError) as error:
            cause = error if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
            raise EnvError(f"set-up step {number} ({step.type}): {cause}") from error


# --- the steps, by OSWorld's names and parameters --------------------------------------------


def _download(guest: Guest, context: EpisodeContext, *, files: Sequence[Mapping[str, str]]) -> None:
    for file in files:
        guest.upload(file["path"], context.downloads.fetch(file["url"]))


def _upload_file(guest: Guest, _: EpisodeContext, *, files: Sequence[Mapping[str, str]]) -> None:
    for file in files:
        guest.upload(file["path"], Path(file["local_path"]).read_bytes())


def _launch(
    guest: Guest, _: EpisodeContext, *, command: str | Sequence[str], shell: bool = False
) -> None:
    if isinstance(command, str) and not shell:
        command = command.split()
    guest.prepare("launch", {"command": command, "shell": shell})


def _open(guest: Guest, _: EpisodeContext, *, path: str) -> None:
    guest.prepare("open_file", {"path": path}, deadline_s=STEP_DEADLINE_S)


def _execute(
    guest: Guest,
    context: EpisodeContext,
    *,
    command: str | Sequence[str],
    stdout: str = "",
    stderr: str = "",
    shell: bool = False,
    until: Mapping[str, Any] | None = None,
) -> None:
    final_command = _fill(command, context)
    deadline, refusals = time.monotonic() + STEP_DEADLINE_S, 0
    while time.monotonic() < deadline:
        try:
            result = guest.execute(
                final_command, shell=shell, deadline_s=150, route="/setup/execute"
            )
        except RefusalError:
            refusals += 1
            if not until or refusals == MOST_REFUSALS:
                raise
            time.sleep(AGAIN_S)
            continue
        for name, text in ((stdout, result.output), (stderr, result.error)):
            if name:
                (context.folder / Path(name).name).write_text(text, encoding="utf-8")
        if _holds(until or {}, result):
            return
        time.sleep(AGAIN_S)
    raise EnvError(f"{command} did not reach {until} in {STEP_DEADLINE_S:g} s")


def _execute_with_verification(
    guest: Guest,
    _: EpisodeContext,
    *,
    command: str | Sequence[str],
    verification: Mapping[str, Any] | None = None,
    max_wait_time: float = 10,
    check_interval: float = 1.0,
    shell: bool = False,
) -> None:
    parameters = {
        "command": command,
        "shell": shell,
        "verification": dict(verification or {}),
        "max_wait_time": max_wait_time,
        "check_interval": check_interval,
    }
    guest.prepare("execute_with_verification", parameters, deadline_s=max_wait_time + 30)


def _sleep(_: Guest, __: EpisodeContext, *, seconds: float) -> None:
    time.sleep(min(max(float(seconds), 0.0), LONGEST_SLEEP_S))


def _window(step: str) -> Callable[..., None]:
    """Return the function of a step that acts on a window, e.g. `close_window`."""

    def perform(
        guest: Guest,
        _: EpisodeContext,
        *,
        window_name: str,
        strict: bool = False,
        by_class: bool = False,
    ) -> None:
        parameters = {"window_name": window_name, "strict": strict, "by_class": by_class}
        guest.prepare(step, parameters)

    return perform


def _change_wallpaper(guest: Guest, _: EpisodeContext, *, path: str) -> None:
    guest.prepare("change_wallpaper", {"path": path})


STEPS: Mapping[str, Callable[..., None]] = {
    "download": _download,
    "upload_file": _upload_file,
    "launch": _launch,
    "open": _open,
    "execute": _execute,
    "command": _execute,
    "execute_with_verification": _execute_with_verification,
    "sleep": _sleep,
    "activate_window": _window("activate_window"),
    "close_window": _window("close_window"),
    "change_wallpaper": _change_wallpaper,
}


def _fill(command: str | Sequence[str], context: EpisodeContext) -> str | list[str]:
    """Return the command with OSWorld's placeholders replaced: password and screen size."""
    if not isinstance(command, str):
        return [str(_fill(str(part), context)) for part in command]
    width, height = context.screen
    values = {
        "CLIENT_PASSWORD": context.password,
        "SCREEN_WIDTH_HALF": str(width // 2),
        "SCREEN_HEIGHT_HALF": str(height // 2),
        "SCREEN_WIDTH": str(width),
        "SCREEN_HEIGHT": str(height),
    }
    for name, value in values.items():
        command = command.replace(f"{{{name}}}", value)
    return command


def _holds(until: Mapping[str, Any], result: Executed) -> bool:
    """Return True if one of the conditions in `until` holds, or there is none."""
    return (
        not until
        or ("returncode" in until and result.returncode == until["returncode"])
        or ("stdout" in until and until["stdout"] in result.output)
        or ("stderr" in until and until["stderr"] in result.error)
    )
