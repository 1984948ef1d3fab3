"""Suite `osworld`: a folder of task files, and the environments that play them.

OsworldSuite    the suite of one folder
OsworldFolder   `osworld:FOLDER`, the suite of any folder

The folder that ships with dart, tasks/, has a few files that any Linux guest can play; OSWorld's own are not
shipped.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from bus.errors import MissingPartError, TaskError
from envs.contract.base import ObservedKind, Task
from envs.contract.options import ImageEncoding, Pause, Seconds, checked
from envs.suites.osworld.classify import classified, refuse_lacking
from envs.suites.osworld.container import (
    IMAGE,
    ContainerProvider,
    Machine,
    check_machine,
    find_engine,
)
from envs.suites.osworld.downloads import Downloads, default_downloads
from envs.suites.osworld.env import OsworldEnv, needs_osworld_package
from envs.suites.osworld.evaluator_process import (
    FIX,
    EvaluatorProcess,
    find_checkout,
    find_python,
)
from envs.suites.osworld.guest import Address, import_urllib3, read_address
from envs.suites.osworld.provider import (
    BootGate,
    Provider,
    Restart,
    UrlProvider,
    boots_at_once,
    usable_cores,
)
from envs.tools.resource_pools import SharedPools
from envs.tools.taskfile import load_tasks, read_ids

logger = logging.getLogger(__name__)


class OsworldSuite:
    """The task files of one folder, which are played in OSWorld's guests.

    OSWorld's own tasks are not shipped: name their folder in a module, `suite =
    OsworldSuite("OSWorld/evaluation_examples/examples", name="my")`. `only` limits the suite to some tasks,
    and the tasks of `heldout` are never trained on; both are ids, or a JSON file of ids such as OSWorld's
    test_nogdrive.json.
    """

    observes: tuple[ObservedKind, ...] = ("accessibility", "terminal")

    def __init__(
        self,
        folder: str | Path = "",
        *,
        name: str = "osworld",
        only: str | Path | Collection[str] = (),
        heldout: str | Path | Collection[str] = (),
    ) -> None:
        self.name = name
        self._folder = Path(folder) if folder else Path(__file__).parent / "tasks"
        loaded = load_tasks(self._folder, heldout=_ids(heldout))
        for error in loaded.errors:
            logger.error("left out: %s", error)
        ids = _ids(only) or loaded.tasks.keys()
        if unknown := sorted(set(ids) - loaded.tasks.keys()):
            raise TaskError(f"{self._folder} has no task {unknown[0]!r}, which `only` names")
        self._files = {
            f"{name}/{file.id}": file for file in loaded.tasks.values() if file.id in ids
        }
        self.tasks: Mapping[str, Task] = {
            task_id: file.task(name, snapshot=file.snapshot)
            for task_id, file in self._files.items()
        }
        self._urls = SharedPools[Address]("url", read_address)

    @checked
    def make_env(
        self,
        *,
        url: str | list[str] = "",
        vm: str = "",
        image: str = IMAGE,
        ram_gb: Annotated[int, Field(ge=1)] = 4,
        cpus: Annotated[int, Field(ge=1)] = 4,
        boot_s: Seconds = 300.0,
        boots: Annotated[int, Field(ge=1)] | None = None,
        turn_s: Pause = 1800.0,
        restart: str = "",
        restart_s: Seconds = 120.0,
        pause_s: Pause = 2.0,
        encoding: ImageEncoding = "png",
        evaluator_python: str = "",
        evaluator_s: Seconds = 180.0,
        checkout: str = "",
        password: str = "password",  # noqa: S107 - the password of OSWorld's images
        downloads: str = "",
        downloads_gb: Annotated[float, Field(ge=0)] = 20.0,
        deadline_s: Seconds = 30.0,
        observe: Sequence[ObservedKind] = (),
    ) -> OsworldEnv:
        """Return an environment with its own guest, which the first reset starts. Raises TaskError.

        The guest: either `url` names a server that runs already (a list has one for each slot), or `vm` is
        the qcow2 image that containers of `image` boot with `ram_gb` and `cpus`, in at most `boot_s`.
        `restart` is a command of this host that restarts a guest of `url` that shows no screen, in at most
        `restart_s`. `password` is the guest user's.

        Boots: at most `boots` machines of this user boot at once on the host. If it is unset, the booting
        machines may use half of the host's cores (`boots_at_once`). A slot waits for its turn as long as
        other machines begin to boot, and gives up after `turn_s` in which none does.

        Times: a guest has `pause_s` to react to an action, a call may take `deadline_s`, an evaluator
        `evaluator_s`.

        Evaluators: `evaluator_python` is an interpreter that has desktop-env, `checkout` the folder of
        OSWorld in which evaluators run (by default the one that contains the task files). Fetched files are
        kept in the folder `downloads`, at most `downloads_gb`.
        """
        if url and vm:
            raise TaskError(
                "url and vm exclude each other: a guest that runs, or a machine to boot"
            )
        if restart and not url:
            raise TaskError(
                "restart needs a guest that runs already: set url, or leave restart out"
            )
        provider: Provider
        if url:
            provider = UrlProvider(
                self._urls.of(url), Restart(restart, restart_s) if restart else None
            )
        else:
            provider = ContainerProvider(
                Machine(
                    Path(vm or "Ubuntu.qcow2").expanduser(), image, ram_gb, cpus, boot_s=boot_s
                ),
                BootGate(boots or boots_at_once(usable_cores(), cpus)),
                turn_s,
            )
        return OsworldEnv(
            self.name,
            self._files,
            provider,
            EvaluatorProcess(find_python(evaluator_python), evaluator_s, self._checkout(checkout)),
            pause_s=pause_s,
            encoding=encoding,
            deadline_s=deadline_s,
            observe=observe,
            password=password,
            downloads=Downloads(
                Path(downloads).expanduser() if downloads else default_downloads(),
                most_gb=downloads_gb,
            ),
        )

    @checked
    def longest_reset_s(
        self, *, url: str | list[str] = "", boot_s: Seconds = 300.0, **_: object
    ) -> float:
        """Return the seconds that a boot may take; 0 for a guest that runs already."""
        return 0.0 if url else boot_s

    def classify(self, tasks: Collection[str]) -> dict[str, Any]:
        """Return what these tasks need, according to their files (classify.py)."""
        return classified({task_id: self._files[task_id] for task_id in tasks})

    def check_parts(
        self,
        *,
        url: str | list[str] = "",
        vm: str = "",
        image: str = IMAGE,
        evaluator_python: str = "",
        checkout: str = "",
        tasks: Collection[str] | None = None,
        **_: object,
    ) -> None:
        """Raise MissingPartError if a package, engine, image or interpreter is missing.

        It is also raised if OSWorld's package lacks a function that one of `tasks` names (None: any task).
        """
        import_urllib3()
        if not url:
            client = find_engine()
            try:
                check_machine(client, Machine(Path(vm or "Ubuntu.qcow2").expanduser(), image))
            finally:
                client.close()
        foreign_files = {
            task_id: file
            for task_id, file in self._files.items()
            if (tasks is None or task_id in tasks) and needs_osworld_package(file)
        }
        if not foreign_files:
            return
        python = find_python(evaluator_python)
        if not python:
            raise MissingPartError(
                f"{len(foreign_files)} tasks, {next(iter(foreign_files))} among them, need OSWorld's evaluators "
                f"(package desktop-env): {FIX}"
            )
        refuse_lacking(foreign_files, python, self._checkout(checkout))

    def _checkout(self, option: str) -> Path | None:
        """Return the folder of OSWorld that the option names, or that contains the task files."""
        if not option:
            return find_checkout(self._folder)
        folder = Path(option).expanduser().resolve()
        if not (folder / "desktop_env").is_dir():
            raise MissingPartError(
                f"checkout: {option} has no package desktop_env; name a checkout of OSWorld"
            )
        return folder


class OsworldFolder(OsworldSuite):
    """The suite `osworld:FOLDER`: the task files of a folder or of a checkout of OSWorld, none held out."""

    def __init__(self, of: str) -> None:
        folder = Path(of).expanduser()
        examples = folder / "evaluation_examples" / "examples"
        super().__init__(examples if examples.is_dir() else folder, name=f"osworld:{of}")


def _ids(ids_or_file: str | Path | Collection[str]) -> Collection[str]:
    """Return ids, read from their file if a path is given. Raises TaskError."""
    return read_ids(Path(ids_or_file)) if isinstance(ids_or_file, str | Path) else ids_or_file
