"""Promises of weights as files: complete or absent, checked whole, never published twice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bus.errors import WeightsError
from dart_cli.config.schema import LoraConfig
from dart_cli.weights.file import FileChannel, load
from dart_cli.weights.manifest import (
    MANIFEST,
    WEIGHTS,
    KnownVersion,
    check_adapters,
    newest_version,
    read_manifest,
)
from tests.waiting import PATIENCE_S
from tests.weights.sets import publish


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.full((3, 4), value),
        "b.bias": torch.arange(5, dtype=torch.bfloat16) * value,
        "scalar": torch.tensor(value),
    }


def test_what_is_published_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    published = publish(tensors(0.1), tmp_path, 12)
    assert published.path == tmp_path / "v000012"
    loaded = load(published.path, tensors())
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], value) for name, value in tensors(0.1).items())
    assert read_manifest(published.path).policy_version == 12


def test_the_newest_is_by_number_not_by_name(tmp_path: Path) -> None:
    for version in (2, 1_000_000, 999_999):
        publish(tensors(), tmp_path, version)
    result = newest_version(tmp_path)
    assert result is not None
    assert result.policy_version == 1_000_000


def test_nothing_is_newest_before_the_first(tmp_path: Path) -> None:
    assert newest_version(tmp_path) is None
    assert newest_version(tmp_path / "absent") is None


def test_only_the_last_k_are_kept(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path, keep=2)
    for version in range(5):
        channel.publish(tensors(version), version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000003", "v000004"]


def test_a_version_never_changes_its_weights(tmp_path: Path) -> None:
    first = publish(tensors(1.0), tmp_path, 3)
    assert publish(tensors(1.0), tmp_path, 3) == first
    with pytest.raises(WeightsError, match="never published twice"):
        publish(tensors(2.0), tmp_path, 3)
    assert torch.equal(load(first.path, tensors())["scalar"], torch.tensor(1.0))


def test_a_draft_of_a_killed_publisher_is_no_version_and_is_cleared(tmp_path: Path) -> None:
    draft = tmp_path / ".v000007.draft"
    draft.mkdir()
    (draft / WEIGHTS).write_bytes(b"half")
    assert newest_version(tmp_path) is None
    publish(tensors(), tmp_path, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["v000007"]


def truncate(path: Path) -> None:
    file = path / WEIGHTS
    file.write_bytes(file.read_bytes()[:-3])


def flip(path: Path) -> None:
    file = path / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def foreign(path: Path) -> None:
    """A sound file, of other tensors."""
    save_file({"x": torch.zeros(2)}, path / WEIGHTS)


def no_header(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"\0" * 500)


def no_file(path: Path) -> None:
    (path / WEIGHTS).unlink()


def no_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def bad_manifest(path: Path) -> None:
    (path / MANIFEST).write_text('{"policy_version": 1')


def unknown_field(path: Path) -> None:
    message = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(message | {"pickle": "yes"}))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (truncate, "bytes, but [0-9]+ by its header"),
        (flip, "the digest differs"),
        (foreign, "other tensors than its manifest lists"),
        (no_header, "no safetensors file"),
        (no_file, "removed while it was read"),
        (no_manifest, "removed or never complete"),
        (bad_manifest, "no manifest"),
        (unknown_field, "pickle"),
    ],
)
def test_a_damaged_set_is_refused_with_the_cause(tmp_path: Path, damage, cause: str) -> None:
    path = publish(tensors(), tmp_path, 1).path
    damage(path)
    with pytest.raises(WeightsError, match=cause):
        load(path, tensors())


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda t: t.pop("scalar"), "lacks scalar"),
        (lambda t: t.update(extra=torch.zeros(1)), "holds extra"),
        (lambda t: t.update(scalar=torch.zeros(2)), r"scalar is float32\[2\], the model's"),
        (lambda t: t.update(scalar=torch.tensor(1.0).half()), "scalar is float16"),
        (lambda t: t["a.weight"][1, 1].fill_(float("nan")), "a.weight has values"),
        (lambda t: t["b.bias"][2].fill_(float("inf")), "b.bias has values"),
    ],
)
def test_a_set_that_does_not_fit_the_model_is_refused(tmp_path: Path, change, cause: str) -> None:
    wrong = tensors()
    change(wrong)
    path = publish(wrong, tmp_path, 1).path
    with pytest.raises(WeightsError, match=cause):
        load(path, tensors())


def test_a_disk_that_refuses_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightsError, match="cannot be written"):
        publish(tensors(), tmp_path / "file", 1)


_PUBLISHER = """
import sys, torch
from pathlib import Path
from dart_cli.weights.file import FileChannel
channel = FileChannel(Path(sys.argv[1]), keep=2)
for version in range(120):
    channel.publish({"w": torch.full((20_000,), float(version))}, version)
"""


def test_a_reader_beside_a_publisher_sees_whole_versions_in_order(tmp_path: Path) -> None:
    """A version may vanish before it is read; what is read is whole and never older than before."""
    expected = {"w": torch.zeros(20_000)}
    publisher = subprocess.Popen(
        [sys.executable, "-c", _PUBLISHER, str(tmp_path)], cwd=Path(__file__).parents[2]
    )
    read: list[int] = []
    try:
        while not (read and read[-1] == 119):
            alive = publisher.poll() is None
            published = newest_version(tmp_path)
            assert alive or (published is not None and published.policy_version == 119)
            if published is None:
                continue
            try:
                loaded = load(published.path, expected)["w"]
            except WeightsError as error:
                if "removed" not in str(error):
                    raise
                continue
            assert loaded.unique().tolist() == [float(published.policy_version)]
            read.append(published.policy_version)
        assert publisher.wait(30) == 0
    finally:
        publisher.kill()
    assert read == sorted(read)


def test_a_reader_that_has_opened_a_version_keeps_it(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path, keep=2)
    path = channel.publish(tensors(5.0), 0).path
    with (path / WEIGHTS).open("rb") as handle:
        for version in range(1, 4):
            channel.publish(tensors(), version)
        assert not path.exists()
        assert len(handle.read()) > 0


def test_manifest_reads_do_not_race_with_removal(tmp_path: Path) -> None:
    stop = threading.Event()

    def churn() -> None:
        channel = FileChannel(tmp_path, keep=2)
        try:
            for version in range(200):
                channel.publish({"w": torch.zeros(2)}, version)
        finally:
            stop.set()

    thread = threading.Thread(target=churn)
    thread.start()
    last = -1
    while not stop.is_set():
        result = newest_version(tmp_path)
        if result is not None:
            assert result.policy_version >= last
            last = result.policy_version
    thread.join(timeout=PATIENCE_S)
    assert read_manifest(tmp_path / "v000199").policy_version == 199


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_number_that_the_ledger_knows_is_not_used_for_other_weights(
    tmp_path: Path, is_gone: bool
) -> None:
    first = FileChannel(tmp_path).resume(tensors(1.0), 0)
    if is_gone:  # the folder was emptied, or the run directory copied without it
        shutil.rmtree(first.path)
    again = FileChannel(tmp_path)
    same = KnownVersion(0, first.digest)
    assert again.resume(tensors(1.0), 0, in_ledger=same).policy_version == (1 if is_gone else 0)
    assert again.resume(tensors(1.0), 0, in_ledger=KnownVersion(7, "d")).policy_version == 8
    # The folder has the weights under a number that means others to the ledger.
    assert again.resume(tensors(1.0), 0, in_ledger=KnownVersion(8, "d")).policy_version == 9


def test_settings_of_adapters_are_part_of_a_version(tmp_path: Path) -> None:
    one, other = LoraConfig(rank=2, alpha=4.0), LoraConfig(rank=2, alpha=8.0)
    first = FileChannel(tmp_path, lora=one)
    made = first.resume(tensors(1.0), 0)
    first.close()
    assert read_manifest(made.path).lora == one
    check_adapters(made.path, one)
    for lora in (other, None):
        with pytest.raises(WeightsError, match=r"v000000: model\.lora"):
            check_adapters(made.path, lora)
    again = FileChannel(tmp_path, lora=one)
    assert again.resume(tensors(1.0), 0, in_ledger=KnownVersion(0, made.digest)) == made
    again.close()
    # The same numbers, multiplied by something else, are other weights.
    changed = FileChannel(tmp_path, lora=other)
    now = changed.resume(tensors(1.0), 0, in_ledger=KnownVersion(0, made.digest))
    changed.close()
    assert (now.policy_version, read_manifest(now.path).lora) == (1, other)
    assert now.digest != made.digest


def test_without_adapters_a_manifest_is_as_before_there_were_any(tmp_path: Path) -> None:
    made = publish(tensors(1.0), tmp_path, 0)
    manifest = json.loads((made.path / MANIFEST).read_text())
    assert manifest.keys() == {"policy_version", "size_bytes", "tensors"}
    assert made.digest == blake2b(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    check_adapters(made.path, LoraConfig())  # it says nothing of adapters
