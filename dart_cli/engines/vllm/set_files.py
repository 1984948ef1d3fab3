"""The files that vLLM reads weights and adapters from.

    open_files        holds the files of a weight set open while vLLM's processes read them
    AdapterVersions   the versions of adapters that vLLM serves beside the weights, several at once

Each version of the adapters is a LoRARequest of vLLM, with files in peft's format. A request ends under the
version that it began with. vLLM halts only for the moment in which it reads the files, and computes no keys
and values again. It has room for `slots` versions. A version that no request uses any more is removed when
the next one is added.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from bus.errors import WeightsError, cure_of
from dart_cli.config.schema import LoraConfig
from dart_cli.policy.lora import peft_config, peft_names

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximal ranks that vLLM accepts."""
LEAST_SLOTS = 2
"""Slots for the version that serves and for the next one."""
PREFIX = "dart-adapters-"
"""The prefix of our folders in the system's folder for temporary files."""
_LOCK = "lock"


@contextlib.contextmanager
def open_files(directory: Path) -> Iterator[list[str]]:
    """Yield paths to a set's open files, which this user's processes can read even after its removal.

    The trainer removes old versions, even one that a worker reads at that time. Raises WeightsError if the
    set has been removed already.
    """
    with contextlib.ExitStack() as stack:
        try:
            handles = [
                stack.enter_context(file.open("rb")) for file in directory.glob("*.safetensors")
            ]
        except OSError as error:
            cause = cure_of(error, "removed while it was read")
            raise WeightsError(f"{directory}: {cause} ({error})") from None
        if not handles:
            raise WeightsError(f"{directory}: removed while it was read")
        yield [f"/proc/{os.getpid()}/fd/{handle.fileno()}" for handle in handles]


def adapter_args(lora: LoraConfig, slots: int) -> dict[str, Any]:
    """Return vLLM's arguments for `slots` versions of such adapters."""
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,
        "max_lora_rank": min(rank for rank in RANKS if rank >= lora.rank),
    }


class AdapterVersions:
    """The versions of the adapters in vLLM, and the requests that use each.

    For the engine's event loop alone.
    """

    def __init__(self, lora: LoraConfig, base: Path, slots: int) -> None:
        """Make room for `slots` versions of adapters of the model in the folder `base`."""
        self._lora = lora
        self._base = base
        self._slots = slots
        self._versions: dict[int, LoRARequest] = {}  # by policy version, oldest first
        self._users: dict[int, set[str]] = {}  # by policy version: vLLM's request ids
        self._changed = asyncio.Condition()
        _remove_stale()
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self._lock = _locked(Path(self._folder.name))

    def begin(self, version: int, name: str) -> LoRARequest | None:
        """Note that request `name` uses `version`, and return its adapters; None if it is the base model."""
        self._users.setdefault(version, set()).add(name)
        return self._versions.get(version)

    async def end(self, version: int, name: str) -> None:
        """Note that request `name` is over."""
        self._users[version].discard(name)
        async with self._changed:
            self._changed.notify_all()

    async def add(
        self, llm: AsyncLLM, tensors: Mapping[str, torch.Tensor], version: int
    ) -> tuple[float, float]:
        """Load a version into vLLM, which must have a free slot for it.

        Return the seconds that writing its files took, and the seconds that vLLM took to read them. Raises
        what vLLM raises; vLLM then has the same versions as before.
        """
        from vllm.lora.request import LoRARequest

        began = time.monotonic()
        folder = Path(self._folder.name) / str(version)
        await asyncio.to_thread(self._write, tensors, folder)
        halted = time.monotonic()
        # vLLM's identifiers begin at 1.
        request = LoRARequest(f"v{version}", version + 1, str(folder))
        await llm.add_lora(request)
        self._versions[version] = request
        return halted - began, time.monotonic() - halted

    async def remove_unused(self, llm: AsyncLLM, newest: int) -> None:
        """Remove all versions that no request uses, except for `newest`."""
        for version in [v for v in self._versions if v != newest and not self._users.get(v)]:
            await self._remove(llm, version)

    def oldest_if_full(self) -> int | None:
        """Return the oldest version if there is no room for another one, else None."""
        return min(self._versions) if len(self._versions) >= self._slots else None

    def requests_of(self, version: int) -> set[str]:
        """Return the requests that use `version`, by vLLM's request ids."""
        return set(self._users.get(version, ()))

    async def wait_until_unused(self, version: int) -> None:
        """Wait until no request uses `version`."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._users.get(version))

    def close(self) -> None:
        """Remove the files of all versions."""
        self._folder.cleanup()
        self._lock.close()

    async def _remove(self, llm: AsyncLLM, version: int) -> None:
        """Remove a version from vLLM, and its files."""
        request = self._versions.pop(version)
        self._users.pop(version, None)
        await llm.remove_lora(request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)

    def _write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        folder.mkdir(exist_ok=True)  # it is there if an earlier attempt has failed
        config = peft_config(self._lora, str(self._base))
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(peft_names(tensors), folder / "adapter_model.safetensors")


def _locked(folder: Path) -> IO[bytes]:
    """Mark a folder as in use by a locked file, and return the file; closing it frees the lock.

    The file gets its name only after it is locked.
    """
    file = (folder / f".{_LOCK}").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    (folder / f".{_LOCK}").rename(folder / _LOCK)
    return file


def _remove_stale() -> None:
    """Remove the folders that killed processes have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # An OSError means that the folder is in use, or belongs to another user.
        with contextlib.suppress(OSError), (folder / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
