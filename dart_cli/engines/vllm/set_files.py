"""The files that vLLM reads weights and adapters from.

    open_files        those of a weight set, held open while vLLM's processes read them
    AdapterVersions   adapters that vLLM serves beside the weights, several versions at once

Each version of adapters is a LoRARequest of vLLM's own, with files in peft's format. A request ends under the
version that it began with: nothing halts but for the moment in which vLLM reads the files, and no keys
and values are computed again. vLLM has room for `slots` versions; versions that no request uses any
more are removed when the next one comes.
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
"""The ranks that vLLM makes room for."""
LEAST_SLOTS = 2
"""The version that serves, and the one that comes."""
PREFIX = "dart-adapters-"
"""Of folders in the system's place for temporary files."""
_LOCK = "lock"


@contextlib.contextmanager
def open_files(directory: Path) -> Iterator[list[str]]:
    """Paths to a set's open files for other processes of this user, valid if the set is removed.

    The trainer removes old versions without knowing which one a worker reads. Raises WeightsError.
    """
    with contextlib.ExitStack() as stack:
        try:
            handles = [
                stack.enter_context(file.open("rb")) for file in directory.glob("*.safetensors")
            ]
        except OSError as error:
            cure = cure_of(error, "removed while it was read")
            raise WeightsError(f"{directory}: {cure} ({error})") from None
        if not handles:
            raise WeightsError(f"{directory}: removed while it was read")
        yield [f"/proc/{os.getpid()}/fd/{handle.fileno()}" for handle in handles]


def adapter_args(lora: LoraConfig, slots: int) -> dict[str, Any]:
    """Arguments of vLLM for `slots` versions of such adapters."""
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,
        "max_lora_rank": min(rank for rank in RANKS if rank >= lora.rank),
    }


class AdapterVersions:
    """The versions that vLLM holds, oldest first. Used by the engine's event loop alone."""

    def __init__(self, lora: LoraConfig, base: Path, slots: int) -> None:
        """Take the folder of the base model that they adapt as `base`."""
        self._lora = lora
        self._base = base
        self._slots = slots
        self._held: dict[int, LoRARequest] = {}  # by policy version
        self._users: dict[int, set[str]] = {}  # by policy version: vLLM's request ids
        self._changed = asyncio.Condition()
        _remove_stale()
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self._lock = _locked(Path(self._folder.name))

    def begin(self, version: int, name: str) -> LoRARequest | None:
        """Return the adapters of `version` for request `name`; None where that is the base."""
        self._users.setdefault(version, set()).add(name)
        return self._held.get(version)

    async def end(self, version: int, name: str) -> None:
        """Note that request `name` is over."""
        self._users[version].discard(name)
        async with self._changed:
            self._changed.notify_all()

    async def add(
        self, llm: AsyncLLM, tensors: Mapping[str, torch.Tensor], version: int
    ) -> tuple[float, float]:
        """Load a version; returns the seconds of writing its files and of vLLM's reading them.

        There must be room. Raises what vLLM raises; it then holds what it held.
        """
        from vllm.lora.request import LoRARequest

        began = time.monotonic()
        folder = Path(self._folder.name) / str(version)
        await asyncio.to_thread(self._write, tensors, folder)
        written = time.monotonic()
        # Identifiers begin at 1.
        request = LoRARequest(f"v{version}", version + 1, str(folder))
        await llm.add_lora(request)
        self._held[version] = request
        return written - began, time.monotonic() - written

    async def remove_unused(self, llm: AsyncLLM, newest: int) -> None:
        """Remove the versions without a request, but for `newest`."""
        for version in [v for v in self._held if v != newest and not self._users.get(v)]:
            await self._remove(llm, version)

    def crowded(self) -> tuple[int, set[str]] | None:
        """Return the oldest version and its requests, if there is no room for another; else None."""
        if len(self._held) < self._slots:
            return None
        oldest = min(self._held)
        return oldest, set(self._users.get(oldest, ()))

    async def unused(self, version: int) -> None:
        """Wait until no request uses `version`."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._users.get(version))

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
        self._lock.close()

    async def _remove(self, llm: AsyncLLM, version: int) -> None:
        request = self._held.pop(version)
        self._users.pop(version, None)
        await llm.remove_lora(request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)

    def _write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        folder.mkdir(exist_ok=True)  # an attempt may have failed
        config = peft_config(self._lora, str(self._base))
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(peft_names(tensors), folder / "adapter_model.safetensors")


def _locked(folder: Path) -> IO[bytes]:
    """Mark a folder as in use for as long as the file is open; the mark is there once it is locked."""
    file = (folder / f".{_LOCK}").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    (folder / f".{_LOCK}").rename(folder / _LOCK)
    return file


def _remove_stale() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with (
            contextlib.suppress(OSError),
            (folder / _LOCK).open("rb") as file,
        ):  # in use, or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
