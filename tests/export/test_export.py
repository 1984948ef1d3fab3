"""Promises of `dart export`: the folder is the run's weights, whole, and says where they come from."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from bus.errors import CheckpointError, ModelError, RunDirectoryError, UserError
from bus.weights import WeightsPublished
from dart_cli.algo.statistics import wilson
from dart_cli.cli.main import main
from dart_cli.config.architecture import MIXTURES
from dart_cli.config.model_folder import TUNED, weight_files
from dart_cli.config.schema import Config, LoraConfig, ModelConfig
from dart_cli.data.store.open import open_store
from dart_cli.evaluation.results import Evaluation, ModeScore, TaskScore, eval_dir
from dart_cli.export.folder import export_folder
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.policy.model_files import PolicyFiles
from dart_cli.runtime.run_dir import save_config
from dart_cli.train.checkpoints.identity import TrainedPart, TrainerProgress
from dart_cli.weights.folder import model_identity
from scripts.small_models import FAMILIES, build
from scripts.tiny_model import build_tiny, save
from tests.data.parts import (
    MIXED,
    a_batch,
    batch_trained,
    make_ledger,
    next_batch,
    play_group,
    small_config,
)
from tests.train import parts
from tests.weights.sets import publish


def run_of(tmp_path: Path, folder: Path, dtype: str = "float32") -> Config:
    """A run whose trainer has published nothing yet."""
    config = small_config(tmp_path / "run")
    config.run.dir.mkdir(mode=0o700, exist_ok=True)
    model = ModelConfig.model_validate({"path": str(folder), "dtype": dtype})
    return config.model_copy(update={"model": model})


def changed(folder: Path, dtype: str = "float32", by: float = 0.125) -> dict[str, torch.Tensor]:
    """The model's tensors after some training."""
    tensors = weight_tensors(load_policy(folder, dtype).model)
    return {name: tensor + by for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(folder, *build_tiny(seed=0), build={})
    return folder


@pytest.fixture(scope="module")
def trained_tiny(tiny: Path) -> dict[str, torch.Tensor]:
    return changed(tiny)


def assert_holds(out: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Both ways to load the folder give just these tensors."""
    for model in (
        load_policy(out, "auto").model,
        AutoModelForImageTextToText.from_pretrained(out, local_files_only=True),
    ):
        held = dict(model.named_parameters())
        assert held.keys() == tensors.keys()
        for name, value in tensors.items():
            assert held[name].dtype == value.dtype
            assert torch.equal(held[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_folder_is_the_published_version(tmp_path: Path, model_type: str, dtype: str) -> None:
    base = build(model_type, tmp_path / "base")
    config = run_of(tmp_path, base, dtype)
    tensors = changed(base, dtype)
    publish(tensors, config.run.dir / "weights", 3)
    out = tmp_path / "out"
    export_folder(config, out, version=3, shard="40KB")
    assert_holds(out, tensors)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    assert {file.name for file in out.glob("*.safetensors")} == files
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the files of a folder, by its name there."""
    return {
        name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("kind", "dtype", "shard", "count"),
    [
        *(
            ("qwen3_5", dtype, shard, 15)
            for dtype in ("float32", "bfloat16")
            for shard in ("5GB", "300KB")
        ),
        ("qwen3_5_moe", "bfloat16", "300KB", 19),
    ],
)
def test_the_layer_that_drafts_is_the_bases_and_the_card_says_so(
    tmp_path: Path, kind: str, dtype: str, shard: str, count: int
) -> None:
    base = build(kind, tmp_path / "base")
    config = run_of(tmp_path, base, dtype)
    tensors = changed(base, dtype)
    publish(tensors, config.run.dir / "weights", 3)
    out = tmp_path / "out"
    export_folder(config, out, shard=shard)
    assert_holds(out, tensors)
    before, after = tensors_of(base), tensors_of(out)
    assert after.keys() == before.keys()  # the names of published folders
    drafting = {name for name in before if name.startswith("mtp.")}
    assert len(drafting) == count  # as in Qwen3.5's folders
    for name in drafting:
        assert torch.equal(after[name], before[name].to(after[name].dtype)), name
    assert {each.dtype for each in after.values()} == {getattr(torch, dtype)}
    assert (
        json.loads((out / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 1
    )
    assert (
        "The multi-token prediction layer (`mtp.*`) is the base" in (out / "README.md").read_text()
    )


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_laid_out_as_in_published_folders_and_read_from_transformers_own(
    tmp_path: Path, kind: str
) -> None:
    """vLLM reads qwen3_vl_moe's stacks transposed, and transformers would save them otherwise."""
    base = build(kind, tmp_path / "base")
    config = run_of(tmp_path, base)
    tensors = changed(base)
    publish(tensors, config.run.dir / "weights", 3)
    export_folder(config, tmp_path / "out")
    layer = "model.language_model.layers.0.mlp.experts"
    files = tensors_of(tmp_path / "out")
    for part in ("gate_up_proj", "down_proj"):
        of_model, of_file = tensors[f"{layer}.{part}"], files[f"{layer}.{part}"]
        if kind == "qwen3_vl_moe":
            of_model = of_model.transpose(1, 2)
        assert torch.equal(of_file, of_model)
    assert {name: each.shape for name, each in files.items()} == {
        name: each.shape for name, each in tensors_of(base).items()
    }

    # A folder as transformers saves it: each expert by itself, or stacks in the model's order.
    model = load_policy(tmp_path / "out").model
    model.save_pretrained(tmp_path / "theirs")
    with PolicyFiles(tmp_path / "theirs") as theirs:
        theirs.check(model)
        for name, value in tensors.items():
            assert torch.equal(theirs.whole(name), value), name
        name = f"{layer}.gate_up_proj"
        assert torch.equal(theirs.rows(name, 3, 6), tensors[name][3:6])
        assert theirs.rows(name, 8, 8).shape == (0, *tensors[name].shape[1:])


def test_a_base_that_lost_the_layer_that_drafts_gives_a_folder_that_claims_none(
    tmp_path: Path,
) -> None:
    """As transformers saves a model: its config.json still says that there is one."""
    base = build("qwen3_5", tmp_path / "base")
    kept = {name: each for name, each in tensors_of(base).items() if not name.startswith("mtp.")}
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    config = run_of(tmp_path, base)
    tensors = changed(base)
    publish(tensors, config.run.dir / "weights", 3)
    out = tmp_path / "out"
    export_folder(config, out)
    assert_holds(out, tensors)
    assert tensors_of(out).keys() == kept.keys()
    assert (
        json.loads((out / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 0
    )
    assert "mtp" not in (out / "README.md").read_text()


def test_tokenizer_template_and_preprocessor_are_those_of_the_base(
    tmp_path: Path, tiny: Path, trained_tiny: dict[str, torch.Tensor]
) -> None:
    config = run_of(tmp_path, tiny)
    publish(trained_tiny, config.run.dir / "weights", 1)
    out = tmp_path / "out"
    export_folder(config, out)
    left_out = {"model.safetensors", "README.md", "config.json"}
    for file in tiny.iterdir():
        if file.name not in left_out and file.suffix in (".json", ".jinja", ".txt"):
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    mine, theirs = (AutoTokenizer.from_pretrained(each) for each in (tiny, out))
    assert mine.get_vocab() == theirs.get_vocab()
    assert mine.chat_template == theirs.chat_template
    again = export_folder(
        run_of(tmp_path, out), tmp_path / "again"
    )  # it may be model.path of a run
    assert again.policy_version == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_exported_with_what_was_frozen(
    tmp_path: Path, tiny: Path, dtype: str
) -> None:
    config = run_of(tmp_path, tiny, dtype)
    expected = weight_tensors(load_policy(tiny, dtype).model)
    state = {name: value.float() + 0.1 for name, value in expected.items() if "visual" not in name}
    moments = {f"{name}/exp_avg": torch.ones_like(value) for name, value in state.items()}
    parts.save(
        config.run.dir / "checkpoints",
        TrainerProgress(updates=7),
        state | moments,
        model=model_identity(tiny),
    )
    out = tmp_path / "out"
    assert export_folder(config, out, checkpoint=True).updates == 7
    rounded = {name: value.to(expected[name].dtype) for name, value in state.items()}
    assert_holds(out, expected | rounded)
    assert "checkpoint c000007" in (out / "README.md").read_text()


def test_a_checkpoint_of_another_folder_is_refused(tmp_path: Path, tiny: Path) -> None:
    config = run_of(tmp_path, tiny)
    directory = config.run.dir / "checkpoints"
    state = {name: value.clone() for name, value in changed(tiny).items()}
    parts.save(directory, TrainerProgress(updates=1), state, model="another")
    with pytest.raises(ModelError, match="put the folder back"):
        export_folder(config, tmp_path / "out", checkpoint=True)
    parts.save(directory, TrainerProgress(updates=2), {"w": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="which the model lacks"):
        export_folder(config, tmp_path / "out", checkpoint=True)
    assert not (tmp_path / "out").exists()


def test_the_card_says_how_it_was_trained_and_what_it_reaches(
    tmp_path: Path, tiny: Path, trained_tiny: dict[str, torch.Tensor]
) -> None:
    config = run_of(tmp_path, tiny)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for _ in range(config.data.groups_per_batch):
            play_group(ledger, MIXED)
        ledger.batch_trained(batch_trained(a_batch(next_batch(ledger, 0)).batch_id))
        made = publish(trained_tiny, config.run.dir / "weights", 1)
        ledger.weights_published(
            WeightsPublished(policy_version=1, path=str(made.path), digest=made.digest, updates=1)
        )
        play_group(ledger, MIXED, version=1)
        store.commit()
    score = TaskScore(task_id="a", episodes=200, passed=150, invalid=0, steps=300)
    for version in (0, 1):
        mode = ModeScore(tasks=[score], heldout=[])
        evaluation = Evaluation(
            name=f"v{version}",
            model="m",
            weights="",
            policy_version=version,
            seed=0,
            wall_s=1.0,
            modes={"sampled": mode},
        )
        eval_dir(config.run.dir).mkdir(exist_ok=True)
        file = eval_dir(config.run.dir) / f"v{version}.json"
        file.write_text(evaluation.model_dump_json())
    export_folder(config, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    low, high = wilson(150, 200)
    assert (
        card.count("fresh instances of trained tasks, sampled |") == 1
    )  # that of version 0 is of other weights
    assert (
        f"| fresh instances of trained tasks, sampled | 0.750 | {low:.3f} - {high:.3f} | 200 |"
        in card
    )
    assert "| training tasks, sampled by this version in the run | 0.500 |" in card
    assert f"| digest | `{made.digest}` |" in card
    assert f"| updates | 1 of {config.train.updates} |" in card
    assert f"| base model | `{tiny.name}` |" in card
    assert str(tmp_path) not in card  # no folder of this host is named
    assert front_of(card) == {"library_name: transformers", f'base_model: "{tiny.name}"'}


def test_the_card_names_what_a_tuned_folder_began_from(
    tmp_path: Path, tiny: Path, trained_tiny: dict[str, torch.Tensor]
) -> None:
    tuned = tmp_path / "todo"
    shutil.copytree(tiny, tuned)
    record = {"base": "small", "examples": 120, "updates": 77}
    (tuned / TUNED).write_text(json.dumps(record))
    config = run_of(tmp_path, tuned)
    publish(trained_tiny, config.run.dir / "weights", 1)
    export_folder(config, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| base model | `small` |" in card
    assert "| supervised training | `todo`: 120 examples, 77 updates |" in card
    assert front_of(card) == {"library_name: transformers", 'base_model: "small"'}


def front_of(card: str) -> set[str]:
    """What the card's head says of the library and the base."""
    head = card.split("---\n")[1]
    return {line for line in head.splitlines() if line.startswith(("library_name", "base_model"))}


def test_the_cards_settings_are_toml_of_a_configuration(
    tmp_path: Path, tiny: Path, trained_tiny: dict[str, torch.Tensor]
) -> None:
    config = run_of(tmp_path, tiny)
    env = {"options": {"size": "168x168", "a key": [1.5, True]}, "tasks": ["mini/popup"]}
    policy = {"template": "```\n{instruction}\n```", "system_prompt": "tab\there\n\x7f"}
    given = {"env": config.env.model_copy(update=env)}
    given["policy"] = config.policy.model_copy(update=policy)
    config = config.model_copy(update=given)
    publish(trained_tiny, config.run.dir / "weights", 1)
    export_folder(config, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    [(_, settings)] = re.findall(r"^(`{3,})toml\n(.*?)\n\1$", card, re.MULTILINE | re.DOTALL)
    told = Config.model_validate(tomllib.loads(settings))
    assert told.env.options == env["options"]
    assert told.data == config.data
    assert told.policy == config.policy
    assert told.model.path == Config().model.path  # no folder of this host is named


def test_all_files_of_the_folder_have_one_mode(
    tmp_path: Path, tiny: Path, trained_tiny: dict[str, torch.Tensor]
) -> None:
    config = run_of(tmp_path, tiny)
    publish(trained_tiny, config.run.dir / "weights", 1)
    export_folder(config, tmp_path / "out")
    beside = tmp_path / "beside"
    beside.touch()
    assert {file.stat().st_mode for file in (tmp_path / "out").iterdir()} == {beside.stat().st_mode}


def test_without_an_evaluation_the_card_says_so(
    tmp_path: Path, tiny: Path, trained_tiny: dict[str, torch.Tensor]
) -> None:
    config = run_of(tmp_path, tiny)  # and without a database: its weights were copied here
    publish(trained_tiny, config.run.dir / "weights", 4)
    export_folder(config, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Success was not measured for these weights" in card
    assert "| policy version | 4 |" in card


def test_mistakes_are_one_line_with_the_cure(
    tmp_path: Path, tiny: Path, trained_tiny: dict[str, torch.Tensor]
) -> None:
    config = run_of(tmp_path, tiny)
    out = tmp_path / "out"
    with pytest.raises(RunDirectoryError, match="has published none yet"):
        export_folder(config, out)
    with pytest.raises(RunDirectoryError, match=r"no intact checkpoint.*checkpoint_every = "):
        export_folder(config, out, checkpoint=True)
    for version in (2, 5):
        publish(trained_tiny, config.run.dir / "weights", version)
    with pytest.raises(UserError, match="has no version 3; its versions are 2, 5"):
        export_folder(config, out, version=3)
    with pytest.raises(UserError, match=r"--merged .* \(model.lora is unset\): leave out --merged"):
        export_folder(config, out, merge=True)
    with pytest.raises(UserError, match="there is no folder"):
        export_folder(config, tmp_path / "absent" / "out")
    assert not out.exists()
    out.mkdir()
    with pytest.raises(UserError, match="exists; name a folder that does not"):
        export_folder(config, out)
    assert list(out.iterdir()) == []


def test_the_verb_exports_a_run_directory(
    tmp_path: Path,
    tiny: Path,
    trained_tiny: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = run_of(tmp_path, tiny)
    save_config(config)
    publish(trained_tiny, config.run.dir / "weights", 2)
    out = tmp_path / "out"

    def run(*arguments: object) -> int:
        with pytest.raises(SystemExit) as exit_:
            main(["export", str(config.run.dir), str(out), *map(str, arguments)])
        return int(exit_.value.code or 0)

    assert run("--version", 9) == 2
    assert "its versions are 2" in capsys.readouterr().err
    assert run("--version", 2, "--checkpoint") == 2
    assert run("--version", 2) == 0
    assert "version 2" in capsys.readouterr().out
    assert_holds(out, trained_tiny)
    assert run() == 2


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_adapters_are_exported_alone_for_peft_or_merged(tmp_path: Path, model_type: str) -> None:
    peft = pytest.importorskip("peft")
    base = build(model_type, tmp_path / "base")
    lora = LoraConfig(rank=3, alpha=7.0)
    config = run_of(tmp_path, base)
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    ours = load_policy(base, lora=lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in weight_tensors(ours.model).values():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    publish(weight_tensors(ours.model), config.run.dir / "weights", 2, lora=config.model.lora)

    export_folder(config, tmp_path / "alone")
    export_folder(config, tmp_path / "merged", merge=True)
    plain = AutoModelForImageTextToText.from_pretrained(base, local_files_only=True)
    by_peft = peft.PeftModel.from_pretrained(plain, tmp_path / "alone").merge_and_unload()
    expected = dict(by_peft.named_parameters())
    held = dict(load_policy(tmp_path / "merged").model.named_parameters())
    assert held.keys() == expected.keys()
    before = dict(load_policy(base).model.named_parameters())
    differ = 0
    for name, value in expected.items():
        torch.testing.assert_close(held[name], value, rtol=1e-6, atol=1e-6)
        differ += not torch.equal(held[name], before[name])
    assert differ == len(weight_tensors(ours.model)) / 2
    assert (tmp_path / "alone" / "tokenizer_config.json").exists()
    assert not (tmp_path / "alone" / "config.json").exists()
    heads = {"alone": "peft", "merged": "transformers"}
    for name, library in heads.items():
        card = (tmp_path / name / "README.md").read_text()
        assert front_of(card) == {f"library_name: {library}", 'base_model: "base"'}
        assert ("PeftModel.from_pretrained" in card) == (library == "peft")


def with_lora(config: Config, lora: LoraConfig | None) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})


def drawn(folder: Path, lora: LoraConfig) -> dict[str, torch.Tensor]:
    """Adapters after some training."""
    generator = torch.Generator().manual_seed(1)
    shapes = weight_tensors(load_policy(folder, lora=lora).model)
    return {n: 0.3 * torch.randn(t.shape, generator=generator) for n, t in shapes.items()}


@pytest.mark.parametrize("source", ["version", "checkpoint"])
@pytest.mark.parametrize("now", [{"alpha": 14.0}, {"alpha": 7.0, "rank": 5}, None], ids=str)
def test_adapters_have_the_settings_that_are_stored_with_them(
    tmp_path: Path, tiny: Path, source: str, now: dict[str, float] | None
) -> None:
    """The run was since started with others."""
    pytest.importorskip("peft")
    lora = LoraConfig(rank=3, alpha=7.0)
    config = with_lora(run_of(tmp_path, tiny), lora)
    adapters = drawn(tiny, lora)
    publish(adapters, config.run.dir / "weights", 2, lora=lora)
    checkpoints, part = config.run.dir / "checkpoints", TrainedPart.of(config)
    parts.save(checkpoints, TrainerProgress(updates=2), adapters, trained=part)

    later = with_lora(config, None if now is None else LoraConfig.model_validate(now))
    of = {"checkpoint": source == "checkpoint"}
    assert export_folder(config, tmp_path / "expected", merge=True).lora == lora
    assert export_folder(later, tmp_path / "merged", merge=True, **of).lora == lora
    export_folder(later, tmp_path / "alone", **of)
    expected, merged = (load_policy(tmp_path / name).model for name in ("expected", "merged"))
    assert expected.state_dict().keys() == merged.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value), name
    told = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"]) == (3, 7.0)
    assert "alpha = 7.0" in (tmp_path / "alone" / "README.md").read_text().replace(": ", " = ")


def test_whole_weights_stay_so_whatever_the_configuration_says_now(
    tmp_path: Path, tiny: Path, trained_tiny: dict[str, torch.Tensor]
) -> None:
    pytest.importorskip("peft")
    config = run_of(tmp_path, tiny)
    publish(trained_tiny, config.run.dir / "weights", 2)
    assert export_folder(with_lora(config, LoraConfig()), tmp_path / "out").lora is None
    assert_holds(tmp_path / "out", trained_tiny)
