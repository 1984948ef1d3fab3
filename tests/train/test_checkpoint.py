"""Promises of checkpoints: a resumed run equals an uninterrupted one; only whole, intact ones count."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bus.errors import CheckpointError, ModelError, RunDirectoryError
from bus.messages import Batch
from dart_cli.config.model_folder import resolve
from dart_cli.config.schema import Config
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.loader import load_policy
from dart_cli.train.checkpoints import checkpoint as saving
from dart_cli.train.checkpoints.checkpoint import CheckpointSaver, load, load_newest, newest_weights
from dart_cli.train.checkpoints.identity import (
    STATE,
    TrainedPart,
    TrainerProgress,
)
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.folder import model_identity
from tests.train.conftest import Play
from tests.train.parts import TensorsInMemory, save
from tests.train.trees import tree_batch
from tests.waiting import PATIENCE_S

TENSORS = {
    "w": torch.arange(6.0).reshape(2, 3),
    "w/exp_avg": torch.ones(2, 3),
    "w/step": torch.tensor(3.0),
}
FILE = "r000-000.safetensors"


def write(directory: Path, updates: int) -> Path:
    progress = TrainerProgress(updates=updates, policy_version=updates, last_batch_id=updates)
    return save(directory, progress, TENSORS | {"w": TENSORS["w"] + updates})


def learner(config: Config, **model: object) -> PolicyLearner:
    config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    return PolicyLearner(TrainModel.load(config), config.train)


def assert_equal(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert torch.equal(actual[name], value), name


# --- resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"freeze_vision": True}], ids=str
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    config: Config, batches: list[Batch], tmp_path: Path, model: dict[str, object]
) -> None:
    assert_resumes(lambda: learner(config, **model), batches, tmp_path)


def test_a_resumed_run_of_recurrent_layers_is_the_uninterrupted_one_bit_for_bit(
    config: Config, family: Callable[[str], Path], tmp_path: Path
) -> None:
    """Compare in bfloat16, with layers that are computed again."""
    train = config.train.model_copy(update={"recompute": "layer"})
    changed = config.model_copy(update={"train": train})
    policy = load_policy(family("qwen3_5"), weights=False)
    batches = [tree_batch(policy, seed, groups=1) for seed in range(3)]

    def make() -> PolicyLearner:
        return learner(changed, path=str(family("qwen3_5")), dtype="bfloat16")

    assert_resumes(make, batches, tmp_path)


def test_a_resumed_run_of_a_mixture_replays_the_same_experts_bit_for_bit(
    config: Config, family: Callable[[str], Path], play: Play, tmp_path: Path
) -> None:
    """Compare in bfloat16, where rounding decides between experts."""
    model = {"path": str(family("qwen3_5_moe")), "dtype": "bfloat16"}
    engine = TransformersEngine(load_policy(model["path"]), max_batch=8, records_routing=True)
    batches = [play(engine, 2, 2, 1.0, number) for number in (1, 2, 3)]
    asyncio.run(engine.close())
    assert all(chain.routing for batch in batches for chain in batch.chains)
    assert_resumes(lambda: learner(config, **model), batches, tmp_path)


def assert_resumes(
    make: Callable[[], PolicyLearner], batches: Sequence[Batch], tmp_path: Path
) -> None:
    straight, broken, resumed = (make() for _ in range(3))
    for index, batch in enumerate(batches):
        straight.update(batch, index)
    for index, batch in enumerate(batches[:2]):
        broken.update(batch, index)
    saver = CheckpointSaver(tmp_path)
    saver.begin(TrainerProgress(updates=2), broken.state(), "")
    broken.update(batches[2], 2)  # beside the writing: it must not reach the checkpoint
    saver.wait()
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    resumed.restore(checkpoint.tensors)
    for index, batch in enumerate(batches[2:], start=checkpoint.progress.updates):
        resumed.update(batch, index)
    assert_equal(resumed.model.weights(), straight.model.weights())
    assert_equal(resumed.state(), straight.state())


def test_what_is_frozen_is_left_to_the_model_folder(
    config: Config, batches: list[Batch], tmp_path: Path
) -> None:
    trainee = learner(config, freeze_vision=True)
    trainee.update(batches[0], 0)
    path = save(tmp_path, TrainerProgress(updates=1), trainee.state())
    names = {name for name in load(path).tensors.names if "/" not in name}
    assert names == trainee.model.trainable().keys()
    assert names < trainee.model.weights().keys()


def test_what_was_frozen_may_be_trained_later_but_not_the_reverse(
    config: Config, batches: list[Batch]
) -> None:
    frozen, all_of_it = learner(config, freeze_vision=True), learner(config)
    frozen.update(batches[0], 0)
    all_of_it.restore(TensorsInMemory(frozen.state()))
    assert_equal(all_of_it.model.weights(), frozen.model.weights())
    all_of_it.update(batches[1], 1)
    with pytest.raises(ValueError, match="was trained before"):
        learner(config, freeze_vision=True).restore(TensorsInMemory(all_of_it.state()))


def test_another_model_folder_is_refused_wherever_it_lies(
    config: Config, tmp_path: Path, tiny_folder: Path
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in resolve(config.model.path).iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    identity = model_identity(tiny_folder)
    assert model_identity(moved) == identity
    path = save(tmp_path / "checkpoints", TrainerProgress(), TENSORS, model=identity)
    load(path).refuse_other(identity, TrainedPart())
    [weights] = moved.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match="put the folder back"):
        load(path).refuse_other(model_identity(moved), TrainedPart())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    progress = TrainerProgress(
        updates=7, skipped=1, policy_version=9, last_batch_id=8, batches_trained=[6, 7, 8]
    )
    generator = torch.get_rng_state()
    save(tmp_path, progress, TENSORS, model="that one")
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.progress, checkpoint.model) == (progress, "that one")
    assert_equal({n: checkpoint.tensors.whole(n) for n in checkpoint.tensors.names}, TENSORS)
    assert torch.equal(checkpoint.generator, generator)


def test_there_may_be_no_checkpoint(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "absent") is None


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for updates in (9, 10, 999_999, 1_000_000):
        write(tmp_path, updates)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c1000000", "c999999"]
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.progress.updates == 1_000_000


def test_the_same_number_of_updates_is_saved_once(tmp_path: Path) -> None:
    write(tmp_path, 1)
    save(tmp_path, TrainerProgress(updates=1), {"w": torch.zeros(1)})
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.tensors.shape("w") == (2, 3)


# --- damage -------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    (path / FILE).write_bytes((path / FILE).read_bytes()[:-5])


def lose(path: Path) -> None:
    (path / FILE).unlink()


def garble(path: Path) -> None:
    (path / STATE).write_text("{}")


def pretend(path: Path) -> None:
    content = json.loads((path / STATE).read_text())
    content["progress"]["updates"] = 5
    (path / STATE).write_text(json.dumps(content, indent=1))


@pytest.mark.parametrize("damage", [cut, lose, garble, pretend])
def test_a_damaged_checkpoint_is_put_aside_for_the_one_before(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    damage(write(tmp_path, 2))
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.progress.updates == 1
    assert "c000002" in caplog.text
    again = write(tmp_path, 2)  # trained anew from 1: the damaged one is not in the way
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.path == again


def test_a_reader_beside_the_trainer_passes_over_a_damaged_one_and_changes_nothing(
    config: Config, tmp_path: Path
) -> None:
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": tmp_path})})
    with pytest.raises(RunDirectoryError, match="no intact checkpoint"):
        newest_weights(config)
    directory = tmp_path / "checkpoints"
    write(directory, 1)
    cut(write(directory, 2))
    results = newest_weights(config)
    assert results.progress.updates == 1
    assert results.weights().names == {"w"}
    assert (directory / "c000002").exists()


def test_weights_that_the_model_lacks_are_named(config: Config, tmp_path: Path) -> None:
    write(tmp_path, 1)
    weights = TrainModel.load(config).weights()
    with pytest.raises(CheckpointError, match="w, which the model lacks"):
        load(tmp_path / "c000001").fill(weights, config.model.path)


@pytest.fixture(scope="module")
def of_several_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("several")
    state = {f"w{number}": torch.full((3, 5), float(number)) for number in range(4)}
    saver = CheckpointSaver(directory, file_bytes=100)
    saver.begin(TrainerProgress(updates=1, batches_trained=[1]), state, "m")
    saver.wait()
    path = directory / "c000001"
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_byte_that_flips_is_noticed(of_several_files: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(of_several_files.iterdir())))
    before = file.read_bytes()
    changed = bytearray(before)
    changed[data.draw(st.integers(0, len(before) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(changed)
    try:
        with pytest.raises(CheckpointError):
            load(of_several_files)
    finally:
        file.write_bytes(before)
    load(of_several_files)


def test_any_files_that_are_missing_are_noticed(of_several_files: Path) -> None:
    files = {file: file.read_bytes() for file in of_several_files.iterdir()}
    for missing in range(1, 2 ** len(files)):
        for number, (file, held) in enumerate(files.items()):
            if missing >> number & 1:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(held)
        with pytest.raises(CheckpointError):
            load(of_several_files)
    for file, held in files.items():
        file.write_bytes(held)
    load(of_several_files)


def test_if_none_is_sound_the_error_names_the_cure(tmp_path: Path) -> None:
    cut(write(tmp_path, 1))
    with pytest.raises(CheckpointError, match="none of 1 checkpoints can be read; remove"):
        load_newest(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(config: Config) -> None:
    trainee = learner(config)
    before = {name: value.clone() for name, value in trainee.state().items()}
    name = next(iter(before))
    for other in (TENSORS, {**before, name: torch.zeros(1)}, {}):
        with pytest.raises(ValueError, match=r"other names or shapes|, the model's"):
            trainee.restore(saved_in_memory(other))
    assert_equal(trainee.state(), before)


def saved_in_memory(state: Mapping[str, torch.Tensor]) -> TensorsInMemory:
    class Checked(TensorsInMemory):
        def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
            for name, target in targets.items():
                if self.shape(name) != tuple(target.shape):
                    raise ValueError("it is [1], the model's another")
            super().fill(targets)

    return Checked(state)


# --- while it is written ------------------------------------------------------------------------


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Return events (writing has begun, it may go on): the files are written, state.json is not."""
    has_begun, go_on = threading.Event(), threading.Event()
    original = saving.write

    def slowly(*arguments: object, **kwargs: object) -> dict[str, str]:
        digests = original(*arguments, **kwargs)  # type: ignore[arg-type]
        has_begun.set()
        assert go_on.wait(PATIENCE_S)
        return digests

    monkeypatch.setattr(saving, "write", slowly)
    return has_begun, go_on


def test_a_checkpoint_counts_only_when_it_is_complete(
    tmp_path: Path, held_back: tuple[threading.Event, threading.Event]
) -> None:
    has_begun, go_on = held_back
    saver = CheckpointSaver(tmp_path)
    state = {"w": torch.zeros(3)}
    saver.begin(TrainerProgress(updates=1), state, "")
    state["w"].fill_(7.0)  # the next update, at once
    assert has_begun.wait(PATIENCE_S)
    assert saver.poll() is None
    assert load_newest(tmp_path) is None
    go_on.set()
    assert saver.wait() == TrainerProgress(updates=1)
    assert saver.poll() is None  # named once
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert torch.equal(checkpoint.tensors.whole("w"), torch.zeros(3))


def test_the_next_save_waits_for_the_one_in_flight(
    tmp_path: Path, held_back: tuple[threading.Event, threading.Event]
) -> None:
    has_begun, go_on = held_back
    saver = CheckpointSaver(tmp_path)
    saver.begin(TrainerProgress(updates=1), {"w": torch.zeros(3)}, "")
    assert has_begun.wait(PATIENCE_S)
    second = threading.Thread(
        target=saver.begin, args=(TrainerProgress(updates=2), {"w": torch.ones(3)}, "")
    )
    second.start()
    assert not (tmp_path / ".c000002.draft").exists()
    go_on.set()
    second.join(PATIENCE_S)
    assert saver.wait() == TrainerProgress(updates=2)
    for updates, value in ((1, 0.0), (2, 1.0)):
        held = load(tmp_path / f"c{updates:06d}").tensors.whole("w")
        assert torch.equal(held, torch.full((3,), value))


def test_a_save_that_never_ends_is_an_error_by_its_deadline(
    tmp_path: Path, held_back: tuple[threading.Event, threading.Event]
) -> None:
    saver = CheckpointSaver(tmp_path, deadline_s=0.05)
    saver.begin(TrainerProgress(updates=1), TENSORS, "")
    with pytest.raises(CheckpointError, match=r"not written after"):
        saver.wait()
    held_back[1].set()


def test_a_rank_that_never_writes_its_part_is_named(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, ranks=2, deadline_s=0.2)
    saver.begin(TrainerProgress(updates=1), TENSORS, "")
    with pytest.raises(CheckpointError, match=r"not written|rank 1 has not written"):
        saver.wait()


def test_the_error_of_a_rank_is_told_by_rank_0(tmp_path: Path) -> None:
    write(tmp_path, 1)
    first = CheckpointSaver(tmp_path, ranks=2)
    other = CheckpointSaver(tmp_path, rank=1, ranks=2)
    draft = tmp_path / ".c000002.draft"
    draft.mkdir()
    (draft / "r001-000.safetensors").touch()  # in the way of rank 1
    other.begin(TrainerProgress(updates=2), TENSORS, "")
    first.begin(TrainerProgress(updates=2), TENSORS, "")
    for saver in (first, other):
        with pytest.raises(CheckpointError, match="cannot be written"):
            saver.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c000001"]


def test_a_full_disk_is_an_error_with_its_cure_and_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1)
    code = f"""
import resource, torch
from pathlib import Path
from dart_cli.train.checkpoints.identity import TrainerProgress
from dart_cli.train.checkpoints.checkpoint import CheckpointSaver
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
saver = CheckpointSaver(Path({str(tmp_path)!r}))
saver.begin(TrainerProgress(updates=2), {{"w": torch.zeros(100_000)}}, "")
saver.wait()
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "CheckpointError" in result.stderr
    assert "cannot be written" in result.stderr
    assert "free space on its disk" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["c000001"]
    load(tmp_path / "c000001")


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saver = CheckpointSaver(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        saver.begin(TrainerProgress(updates=1), TENSORS, "")


@pytest.mark.parametrize("where", ["write", "complete"])
def test_a_kill_while_it_is_written_leaves_the_one_before(tmp_path: Path, where: str) -> None:
    write(tmp_path, 1)
    code = f"""
import sys, threading, torch
from pathlib import Path
from dart_cli.train.checkpoints import checkpoint as saving
from dart_cli.train.checkpoints.identity import TrainerProgress
original = saving.{where}
def stuck(*given, **named):
    if {where!r} == "write":
        original(*given, **named)
    print("here", flush=True)
    threading.Event().wait()
saving.{where} = stuck
saver = saving.CheckpointSaver(Path({str(tmp_path)!r}))
saver.begin(TrainerProgress(updates=2), {{"w": torch.zeros(1000)}}, "")
saver.wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    process.stdout.close()
    assert (tmp_path / ".c000002.draft").is_dir()
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.progress.updates == 1
    write(tmp_path, 2)  # the trainer that goes on finds no trace of it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c000001", "c000002"]
