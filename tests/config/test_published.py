"""The class of a model that is not here follows from its family or its name, and has a published shape."""

from __future__ import annotations

import pytest

from bus.errors import ModelError
from dart_cli.config.architecture import MODEL_TYPES, shape_of
from dart_cli.config.published import OTHER_SIZES, PUBLISHED, published_of
from dart_cli.config.schema import Config


def config_of(path: str, family: str = "none") -> Config:
    return Config.model_validate({"model": {"path": path}, "policy": {"family": family}})


def test_every_class_that_loads_has_a_shape_of_the_size_in_its_name() -> None:
    assert PUBLISHED.keys() == {*MODEL_TYPES}
    billions = {
        kind: shape_of({**each.tree, "model_type": kind}).parameters / 1e9
        for kind, each in PUBLISHED.items()
    }
    expected = {"qwen2_vl": 8.3, "qwen2_5_vl": 8.3, "qwen3_vl": 8.8, "qwen3_5": 9.4}
    expected |= {"qwen3_vl_moe": 31.1, "qwen3_5_moe": 35.1}
    assert billions == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("path", "family", "kind", "is_size"),
    [
        ("models/UI-TARS-1.5-7B", "none", "qwen2_5_vl", True),
        ("models/ui-tars-72b-sft", "none", "qwen2_vl", False),
        ("models/Qwen2.5-VL-3B-Instruct", "none", "qwen2_5_vl", False),
        ("models/Qwen3-VL-8B-Thinking", "none", "qwen3_vl", True),
        ("models/mine", "ui-tars-1.5", "qwen2_5_vl", True),
        ("models/Qwen3.5-9B", "none", "qwen3_5", True),
        ("models/Qwen3-VL-30B-A3B-Instruct", "none", "qwen3_vl_moe", True),
        ("models/qwen3.5-35b-a3b", "none", "qwen3_5_moe", True),
        ("models/Qwen3.5-122B-A10B", "none", "qwen3_5_moe", False),
    ],
)
def test_a_class_follows_from_the_family_or_the_name_of_the_folder(
    path: str, family: str, kind: str, is_size: bool
) -> None:
    published = published_of(config_of(path, family))
    assert published.model_type == kind
    assert published.is_size_of(path) == is_size


@pytest.mark.parametrize(
    ("path", "checkpoint"),
    [
        ("models/Qwen3.5-0.8B", "Qwen3.5-0.8B"),
        ("models/Qwen3.5-4B-Base", "Qwen3.5-4B"),
        ("models/Qwen3.5-27B", "Qwen3.5-27B"),
        ("models/Qwen3.5-mine", "Qwen3.5-9B"),
        ("models/Qwen3-VL-4B-Instruct", "Qwen3-VL-8B-Instruct"),
    ],
)
def test_the_size_is_the_one_in_the_name_where_a_checkpoint_has_it(
    path: str, checkpoint: str
) -> None:
    assert published_of(config_of(path)).checkpoint == checkpoint


def test_no_two_checkpoints_of_a_class_have_one_size() -> None:
    every = [*PUBLISHED.values(), *OTHER_SIZES]
    for one in every:
        fitting = [
            each
            for each in every
            if each.model_type == one.model_type and each.is_size_of(one.checkpoint)
        ]
        assert fitting == [one]


@pytest.mark.parametrize(
    ("path", "family", "words"),
    [
        ("models/mine", "none", "hf download REPO config.json"),
        ("models/mine", "opencua", "class opencua dart does not load; take a checkpoint of class"),
        ("models/mine-30B-A3B", "ui-tars-1.5", "the family ui-tars-1.5 has none that dart loads"),
    ],
)
def test_a_model_without_a_shape_is_refused_with_what_cures_it(
    path: str, family: str, words: str
) -> None:
    with pytest.raises(ModelError) as refused:
        published_of(config_of(path, family))
    assert words in str(refused.value)
