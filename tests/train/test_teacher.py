"""A teacher in the trainer: what it scores, what it leaves as it was, and which folders are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.errors import ModelError, ProtocolError
from bus.packed import int32s
from dart_cli.config.dry_run import describe
from dart_cli.config.rules.check import find_mistakes
from dart_cli.config.schema import (
    Config,
    LoraConfig,
    ModelConfig,
    RunConfig,
    TeacherConfig,
    TrainConfig,
)
from dart_cli.doctor import run_checks
from dart_cli.policy.loader import load_policy
from dart_cli.runtime.run_dir import save_config
from dart_cli.train.checkpoints.checkpoint import CheckpointSaver, load_newest
from dart_cli.train.checkpoints.identity import (
    CheckpointState,
    TrainedPart,
    TrainerProgress,
    refuse_other,
)
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.packs.batch_check import check_batch
from dart_cli.train.packs.pack import Pack, PackFeed
from dart_cli.train.packs.rank_shares import hinted_batch, packed_batches
from dart_cli.train.trained_policy import Step, TaughtSteps, TrainModel, check_teacher
from dart_cli.weights.folder import model_identity
from tests.train.another_model import another
from tests.train.trees import tree_batch, with_hints

Family = Callable[[str], Path]


def config_of(folder: Path, teacher: Path, **changes: Any) -> Config:
    model = ModelConfig(path=str(folder), **changes.pop("model", {}))
    train = TrainConfig(
        **{"lr": 1e-3, "updates": 4, "parity_every": 0, "teacher_weight": 1.0, **changes}
    )
    return Config(model=model, train=train, teacher=TeacherConfig(model=str(teacher)))


def _states_of(model: TrainModel, pack: Pack) -> torch.Tensor:
    states, *_ = model.scorer(pack.inputs, pack.features, pack.rows, None, 1.0)
    return states


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers computed again": {"recompute": "layer"},
    "a frozen tower": {"model": {"freeze_vision": True}},
    "adapters": {"model": {"lora": LoraConfig(rank=4, alpha=8.0)}, "kl_beta": 0.1},
    "bfloat16, offload": {"model": {"dtype": "bfloat16"}, "offload": "optimizer"},
}


@pytest.mark.parametrize("case", CASES)
def test_it_scores_what_its_folder_scores_before_and_after_an_update(
    case: str, family: Family
) -> None:
    """Compare with the folder as a policy of its own, which has a tower of its own."""
    if "adapters" in case:
        pytest.importorskip("peft")
    folder = family("qwen3_vl")
    teacher = another(folder)
    config = config_of(folder, teacher, **CASES[case])
    model = TrainModel.load(config)
    learner = PolicyLearner(model, config.train)
    batch = tree_batch(model.policy)
    alone = TrainModel.load_frozen(
        config.model_copy(
            update={"model": ModelConfig(path=str(teacher), dtype=config.model.dtype)}
        )
    )
    [part] = packed_batches(batch, model.policy, pack_tokens=600)
    weights = [1.0] * len(part.batch.samples)

    def differences() -> list[float]:
        with (
            PackFeed(part, weights, model.policy, keeps_pixels=True) as packs,
            PackFeed(part, weights, alone.policy) as same,
            torch.no_grad(),
        ):
            results = []
            for pack, its_pack in zip(packs, same, strict=True):
                view = model.teacher_view(pack, batch.temperature)
                assert view is not None
                assert not view.states.requires_grad
                assert view.weight is not None
                [states] = alone.scorer(
                    its_pack.inputs, its_pack.features, its_pack.rows, None, batch.temperature
                )
                results.append((view.states - states).abs().max().item())
                results.append((view.weight - alone.scorer.head_weight()).abs().max().item())
                # The policy is compared with itself: no gap.
                own = replace(view, weight=None, states=_states_of(model, pack))
                gaps = model.score(pack, batch.temperature, own).gaps
                assert gaps is not None
                assert gaps.abs().max() < (1e-5 if model.dtype == torch.float32 else 0.02)
            model.reshard()
            model.reshard_teacher()
            return results

    most = 1e-5 if config.model.dtype == "float32" else 0.0
    assert max(differences()) <= most
    update = learner.update(batch, 0)
    assert update.applied, update.note
    assert update.metrics["teacher_gap"] != 0
    assert max(differences()) <= most
    assert not [name for name, each in model.teacher.named_parameters() if each.requires_grad]


def test_a_policy_comes_closer_to_its_teacher_without_any_reward(family: Family) -> None:
    """The same completions again and again: what the teacher finds unlikely becomes unlikely."""
    folder = family("qwen2_5_vl")
    config = config_of(folder, another(folder))
    model = TrainModel.load(config)
    learner = PolicyLearner(model, config.train)
    batch = tree_batch(model.policy)
    samples = [sample.model_copy(update={"advantage": 0.0}) for sample in batch.samples]
    batch = batch.model_copy(update={"samples": samples})
    gaps = [learner.update(batch, number).metrics["teacher_gap"] for number in range(8)]
    assert all(torch.isfinite(torch.tensor(gaps)))
    assert gaps[-1] > gaps[0]


def test_without_a_share_no_teacher_is_loaded(family: Family) -> None:
    folder = family("qwen2_vl")
    model = TrainModel.load(config_of(folder, folder / "nothing", teacher_weight=0.0))
    assert model.teacher is None


# --- refusals --------------------------------------------------------------------------------------


def rewritten(folder: Path, out: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a folder with a changed JSON file."""
    shutil.copytree(folder, out)
    tree = json.loads((out / name).read_text())
    change(tree)
    (out / name).write_text(json.dumps(tree))
    return out


def rename_a_token(tree: dict[str, Any]) -> None:
    words = tree["model"]["vocab"]
    word, number = max(words.items(), key=lambda pair: len(pair[0]))
    del words[word]
    words[word + "x"] = number
    merges = tree["model"].get("merges", [])
    tree["model"]["merges"] = [pair for pair in merges if "".join(pair).replace(" ", "") != word]


def test_another_tokenizer_is_refused_before_anything_starts(
    family: Family, tmp_path: Path
) -> None:
    folder = family("qwen2_5_vl")
    other = rewritten(folder, tmp_path / "other", "tokenizer.json", rename_a_token)
    [mistake] = find_mistakes(config_of(folder, other), "train")
    assert str(mistake).startswith(
        f"teacher.model = '{other}' has another tokenizer than model.path"
    )
    assert "\n" not in str(mistake)
    with pytest.raises(ModelError, match=r"^teacher\.model = .* has another tokenizer than"):
        check_teacher(config_of(folder, other))
    with pytest.raises(ModelError, match="has another tokenizer"):
        TrainModel.load(config_of(folder, other))


def test_other_sizes_of_screens_are_refused_before_anything_starts(
    family: Family, tmp_path: Path
) -> None:
    folder = family("qwen3_vl")

    def change(tree: dict[str, Any]) -> None:
        tree["max_pixels"] = 28 * 28 * 640
        tree["min_pixels"] = 28 * 28
        tree.pop("size", None)

    other = rewritten(folder, tmp_path / "other", "preprocessor_config.json", change)
    [mistake] = find_mistakes(config_of(folder, other), "train")
    assert "prepares screens otherwise than" in str(mistake)
    with pytest.raises(ModelError, match="prepares screens otherwise"):
        check_teacher(config_of(folder, other))


def test_other_colours_of_screens_are_refused_by_the_trainer(
    family: Family, tmp_path: Path
) -> None:
    folder = family("qwen3_vl")
    other = rewritten(
        folder,
        tmp_path / "other",
        "preprocessor_config.json",
        lambda tree: tree.update(image_mean=[0.1, 0.2, 0.3]),
    )
    with pytest.raises(ModelError, match="prepares screens otherwise"):
        check_teacher(config_of(folder, other))


def test_other_ends_are_refused_by_the_trainer(family: Family, tmp_path: Path) -> None:
    folder = family("qwen2_5_vl")
    config = json.loads((folder / "config.json").read_text())
    forbidden = config["image_token_id"] - 1 if "image_token_id" in config else 0
    shutil.copytree(folder, tmp_path / "other")
    file = tmp_path / "other" / "generation_config.json"
    tree = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**tree, "eos_token_id": [forbidden]}))
    with pytest.raises(ModelError, match="has other end tokens"):
        check_teacher(config_of(folder, tmp_path / "other"))


def test_a_pointer_head_that_the_teacher_lacks_is_refused(
    family: Family, pointer_folder: Callable[[str], Path]
) -> None:
    folder = pointer_folder("qwen2_5_vl")
    config = config_of(folder, family("qwen2_5_vl"))
    config = config.model_copy(
        update={"policy": config.policy.model_copy(update={"pointing": "pointer"})}
    )
    with pytest.raises(ModelError, match="no pointer head"):
        check_teacher(config)
    check_teacher(config.model_copy(update={"teacher": TeacherConfig(model=str(another(folder)))}))


def test_what_cannot_score_is_refused_with_one_line(family: Family, tmp_path: Path) -> None:
    folder = family("qwen3_5")
    other = rewritten(
        folder, tmp_path / "other", "config.json", lambda t: t.update(model_type="llava")
    )
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    for teacher, text in (
        ({"model": str(other)}, "model_type is llava, which dart does not load"),
        ({"model": str(adapters)}, "has LoRA adapters"),
        ({"model": ""}, "is empty, and train.teacher_weight = 1 needs a teacher"),
        ({"model": str(folder), "url": "http://localhost:1/v1"}, "gives no log-probabilities"),
        ({"model": str(tmp_path / "none")}, "is no folder"),
    ):
        config = config_of(folder, folder).model_copy(update={"teacher": TeacherConfig(**teacher)})
        [mistake] = find_mistakes(config, "train")
        assert mistake.subject.startswith("teacher.")
        assert text in str(mistake)
        assert "\n" not in str(mistake)


def test_a_teacher_that_only_scores_needs_no_family(family: Family) -> None:
    """The folder's class has several families, so it could not play; what starts a run says what it does."""
    folder = family("qwen3_vl")
    config = config_of(folder, another(folder), teacher_weight=0.5)
    assert list(find_mistakes(config, "train")) == []
    assert dict(describe(config))["teacher"].endswith(
        "scores the policy's tokens: 0.5 of the objective"
    )
    [finding] = run_checks.teacher(config)
    assert finding.level == "ok"


# --- checkpoints -----------------------------------------------------------------------------------


def saved(directory: Path, teacher: str) -> None:
    saver = CheckpointSaver(directory)
    saver.teacher = teacher
    saver.begin(TrainerProgress(updates=3), {"w": torch.zeros(2)}, "m")
    saver.wait()


def test_a_checkpoint_of_another_teacher_is_refused(family: Family, tmp_path: Path) -> None:
    """A teacher that was left out, or came later, is no other teacher."""
    folder = family("qwen2_vl")
    config = config_of(folder, another(folder)).model_copy(
        update={"run": RunConfig(dir=tmp_path / "run")}
    )
    config.run.dir.mkdir(mode=0o700)
    save_config(config)
    saved(config.run.dir / "checkpoints", model_identity(another(folder)))
    checkpoint = load_newest(config.run.dir / "checkpoints")
    assert checkpoint is not None
    part = TrainedPart.of(config)
    for now in (model_identity(another(folder)), ""):
        checkpoint.refuse_other("m", part, now)
    with pytest.raises(ModelError, match=r"^teacher\.model: .* learned from a folder with other"):
        checkpoint.refuse_other("m", part, "other")
    other = config.model_copy(update={"teacher": TeacherConfig(model=str(another(folder, seed=8)))})
    other = other.model_copy(update={"model": config.model})
    with pytest.raises(ModelError, match=r"^teacher\.model: "):
        refuse_other(other)
    refuse_other(config)


def test_a_resumed_learner_with_hints_has_the_teacher_that_the_run_began_with(
    family: Family, tmp_path: Path
) -> None:
    """Compare the second update with that of a learner that was never stopped, bit for bit."""
    folder = family("qwen2_5_vl")
    config = config_of(folder, Path()).model_copy(update={"teacher": TeacherConfig(hints=True)})
    whole = PolicyLearner(TrainModel.load(config), config.train)
    policy = whole.model.policy
    batches = [with_hints(tree_batch(policy, seed), policy) for seed in (1, 2)]
    whole.update(batches[0], 0)
    saver = CheckpointSaver(tmp_path)
    saver.begin(TrainerProgress(updates=1), whole.state(), "m")
    saver.wait()
    resumed = PolicyLearner(TrainModel.load(config), config.train)
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    resumed.restore(checkpoint.tensors)
    results = [each.update(batches[1], 1).metrics for each in (whole, resumed)]
    for name in ("loss", "grad_norm", "teacher_gap"):
        assert results[0][name] == results[1][name], name
    plain = config_of(folder, folder, teacher_weight=0.0)
    without = PolicyLearner(TrainModel.load(plain), plain.train)
    without.restore(checkpoint.tensors)  # a teacher may be left out later


# --- hints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "a frozen tower", "adapters", "bfloat16, offload"])
def test_with_hints_a_policy_learns_what_it_would_say_if_it_read_them(
    case: str, family: Family
) -> None:
    """The same completions again and again; the teacher stays as the run began, whatever the policy learns."""
    if "adapters" in case:
        pytest.importorskip("peft")
    folder = family("qwen3_vl")
    changes = {"lr": 1e-3, "kl_beta": 0.0} if case == "adapters" else {"lr": 3e-5}
    config = config_of(folder, Path(), **CASES[case] | changes)
    config = config.model_copy(update={"teacher": TeacherConfig(hints=True)})
    model = TrainModel.load(config)
    learner = PolicyLearner(model, config.train)
    batch = with_hints(tree_batch(model.policy), model.policy)
    teachers = model.reference_scorer
    assert teachers is not None
    assert (teachers is model.scorer) == (case == "adapters")

    def taught() -> dict[Step, torch.Tensor]:
        [share] = learner.shares(batch, 1)
        steps = TaughtSteps()
        with PackFeed(share.hinted, [0.0] * 999, model.policy) as packs:
            for pack in packs:
                model.add_taught(steps, pack, batch.temperature)
        model.reshard()
        model.reshard_teacher()
        return {key: states for key, (states, _) in steps._steps.items()}

    before = taught()
    updates = [learner.update(batch, 0).metrics for _ in range(8)]
    gaps = [metrics["teacher_gap"] for metrics in updates]
    assert gaps[-1] > gaps[0]
    hinted = sum(len(each) for each in batch.samples if each.weight and each.hint)
    tokens = sum(len(each) for each in batch.samples if each.weight)
    assert updates[0]["taught_fraction"] == pytest.approx(hinted / tokens)
    after = taught()
    assert (
        before.keys()
        == after.keys()
        == {(s.trajectory_id, s.step) for s in batch.samples if s.hint and s.weight}
    )
    for key, states in before.items():
        assert torch.equal(states, after[key])


def test_a_batch_without_any_hint_has_no_teacher(family: Family) -> None:
    folder = family("qwen2_vl")
    config = config_of(folder, Path(), teacher_weight=0.5)
    config = config.model_copy(update={"teacher": TeacherConfig(hints=True)})
    learner = PolicyLearner(TrainModel.load(config), config.train)
    update = learner.update(tree_batch(learner.model.policy), 0)
    assert update.applied
    assert "teacher_gap" not in update.metrics


def test_a_hint_that_makes_a_prompt_too_long_is_left_out(family: Family) -> None:
    policy = load_policy(family("qwen2_vl"))
    batch = with_hints(tree_batch(policy), policy)
    longest = max(sample.end for sample in batch.samples)
    assert len(hinted_batch(batch, longest + 3).samples) > 0
    for most in (longest + 3, longest):
        assert all(sample.end <= most for sample in hinted_batch(batch, most).samples)
    assert not hinted_batch(batch, 1).samples


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"end": 10**6}, "its hint is outside of its prompt"),
        ({"start": 5, "end": 2}, "its hint is outside of its prompt"),
        ({"token_ids": int32s([10**7])}, "a token id of its hint is not in the vocabulary"),
        ({"token_ids": int32s([-1])}, "a token id of its hint is not in the vocabulary"),
        ({"token_ids": "image"}, "its hint changes the images of its prompt"),
    ],
)
def test_a_hint_that_does_not_fit_its_prompt_is_refused(
    family: Family, change: dict[str, Any], cause: str
) -> None:
    policy = load_policy(family("qwen2_vl"))
    if change.get("token_ids") == "image":
        change = {"token_ids": int32s([policy.image_token_id])}
    batch = with_hints(tree_batch(policy), policy)
    at = next(index for index, sample in enumerate(batch.samples) if sample.hint)
    sample = batch.samples[at]
    assert sample.hint is not None
    batch.samples[at] = sample.model_copy(update={"hint": sample.hint.model_copy(update=change)})
    with pytest.raises(ProtocolError, match=cause):
        check_batch(batch, policy)


def test_without_a_teacher_a_checkpoint_is_written_as_before(tmp_path: Path) -> None:
    saved(tmp_path, "")
    text = (tmp_path / "c000003" / "state.json").read_text()
    assert "teacher" not in text
    state = CheckpointState.model_validate_json(text)
    assert state.teacher == ""
    assert state.sealed().text() == text
    assert load_newest(tmp_path) is not None
