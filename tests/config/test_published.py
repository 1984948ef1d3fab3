"""The class of a model that is not here follows from its family or its name, and has a published shape."""

from __future__ import annotations

import pytest

from bus.errors import ModelError
from dart_cli.config.architecture import MODEL_TYPES, shape_of
from dart_cli.config.published import PUBLISHED, published_of
from dart_cli.config.schema import Config


def config_of(path: str, family: str = "none") -> Config:
    return Config.model_validate({"model": {"path": path}, "policy": {"family": family}})


def test_every_class_that_loads_has_a_shape_of_the_size_in_its_name() -> None:
    assert PUBLISHED.keys() == {*MODEL_TYPES}
    billions = {
        kind: shape_of({**each.tree, "model_type": kind}).parameters / 1e9
        for kind, each in PUBLISHED.items()
    }
    assert billions == pytest.approx({"qwen2_vl": 8.3, "qwen2_5_vl": 8.3, "qwen3_vl": 8.8}, abs=0.1)


@pytest.mark.parametrize(
    ("path", "family", "kind", "is_size"),
    [
        ("models/UI-TARS-1.5-7B", "none", "qwen2_5_vl", True),
        ("models/ui-tars-72b-sft", "none", "qwen2_vl", False),
        ("models/Qwen2.5-VL-3B-Instruct", "none", "qwen2_5_vl", False),
        ("models/Qwen3-VL-8B-Thinking", "none", "qwen3_vl", True),
        ("models/Qwen3-VL-30B-A3B-Instruct", "none", "qwen3_vl", False),
        ("models/mine", "ui-tars-1.5", "qwen2_5_vl", True),
    ],
)
def test_a_class_follows_from_the_family_or_the_name_of_the_folder(
    path: str, family: str, kind: str, is_size: bool
) -> None:
    published = published_of(config_of(path, family))
    assert published.model_type == kind
    assert published.is_size_of(path) == is_size


@pytest.mark.parametrize(
    ("path", "family", "words"),
    [
        ("models/mine", "none", "hf download REPO config.json"),
        ("models/Qwen3.5-9B", "none", "class qwen3_5 dart does not load; take a"),
        ("models/mine", "opencua", "class opencua dart does not load; take a checkpoint of class"),
    ],
)
def test_a_model_without_a_shape_is_refused_with_what_cures_it(
    path: str, family: str, words: str
) -> None:
    with pytest.raises(ModelError) as refused:
        published_of(config_of(path, family))
    assert words in str(refused.value)
