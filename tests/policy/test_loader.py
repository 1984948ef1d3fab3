from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from bus.errors import ModelError
from bus.messages import Turn
from dart_cli.policy.forward import (
    BATCHED_VISION,
    collate,
    image_features,
    logits,
    rope_positions,
)
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.policy.prompt import PromptRenderer
from scripts import tiny_model as tiny


def screenshot(seed: int, width: int = 168, height: int = 168) -> bytes:
    rng = Random(seed)
    blocks = Image.new("RGB", (6, 6))
    blocks.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range(36)])
    buffer = io.BytesIO()
    blocks.resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    tiny.save(folder, *tiny.build_tiny(seed=0), build={})
    return folder


def _text(vocab: int, family: str) -> dict[str, Any]:
    return {
        "model_type": f"{family}_text",
        "vocab_size": vocab,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 4, 4],
        },
    }


def _older(folder: Path, config_class: Any, model_class: Any, vision: dict[str, Any]) -> Path:
    """A random folder of an older Qwen family around the tiny tokenizer."""
    tokenizer = tiny.build_tokenizer()
    ids = tokenizer.get_vocab()
    config = config_class(
        text_config=_text(len(tokenizer), config_class.model_type),
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    tiny.save(folder, model_class(config), tokenizer, Qwen2VLImageProcessorPil(), {})
    return folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2}
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    return _older(folder, Qwen2VLConfig, Qwen2VLForConditionalGeneration, vision)


@pytest.fixture(scope="module")
def qwen2_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 48,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    folder = tmp_path_factory.mktemp("models") / "qwen2_5"
    return _older(folder, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, vision)


FAMILIES = ["qwen2", "qwen2_5", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_our_forward_is_the_unpatched_model_of_each_family(
    family: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(family)
    policy = load_policy(folder)
    plain = AutoModelForImageTextToText.from_pretrained(folder).eval()
    renderer = PromptRenderer(policy)
    turns = [Turn(text="click(1,2)", screenshot=screenshot(7, 112, 168)), Turn(text="wait()")]
    prompts = [
        renderer.render("click the red button", turns, screenshot(1)),
        renderer.render("click the blue button", [], screenshot(2)),
        renderer.render("pick red", [], screenshot(1)),
    ]
    inputs = policy.inputs([p.token_ids for p in prompts], [p.images for p in prompts])
    assert len(inputs.images) == 3  # one is shown twice
    shown = [policy.images.prepare(blob) for prompt in prompts for blob in prompt.images]
    is_image = (inputs.input_ids == policy.image_token_id).int()
    with torch.inference_mode():
        mine = logits(policy.model, inputs, last=4)
        theirs = plain(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            mm_token_type_ids=is_image,
            pixel_values=torch.cat([image.patches for image in shown]),
            image_grid_thw=torch.tensor([image.grid for image in shown]),
        ).logits[:, -4:]
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_the_model(family: str, request: pytest.FixtureRequest) -> None:
    policy = load_policy(request.getfixturevalue(family))
    renderer = PromptRenderer(policy)
    turns = [Turn(text="click(1,2)", screenshot=screenshot(3, 196, 112))]
    prompt = renderer.render("click the red button", turns, screenshot(4))
    images = [policy.images.prepare(blob) for blob in prompt.images]
    mine, following = rope_positions(
        prompt.token_ids, [image.grid for image in images], policy.image_token_id, 2
    )
    tokens = torch.tensor([prompt.token_ids])
    inner: Any = policy.model.model
    theirs, delta = inner.get_rope_index(
        tokens,
        (tokens == policy.image_token_id).int(),
        image_grid_thw=torch.tensor([image.grid for image in images]),
    )
    assert torch.equal(mine, theirs[:, 0])
    assert following == len(prompt.token_ids) + int(delta)


def test_gradients_through_shared_images_are_those_of_separate_ones(qwen3: Path) -> None:
    policy = load_policy(qwen3)
    renderer = PromptRenderer(policy)
    prompts = [renderer.render(text, [], screenshot(1)) for text in ("pick red", "pick blue")]

    def gradient(groups: list[list[Any]]) -> torch.Tensor:
        policy.model.zero_grad()
        for group in groups:
            inputs = policy.inputs([p.token_ids for p in group], [p.images for p in group])
            logits(policy.model, inputs, last=1).square().sum().backward()
        visual: Any = policy.model.model
        grad: torch.Tensor = visual.visual.patch_embed.proj.weight.grad
        return grad.clone()

    together, apart = gradient([prompts]), gradient([[prompts[0]], [prompts[1]]])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


def test_images_of_different_size_do_not_see_each_other(qwen3: Path) -> None:
    policy = load_policy(qwen3)
    images = [policy.images.prepare(screenshot(i, 168, 140 + 28 * i)) for i in range(3)]
    with torch.inference_mode():
        together = image_features(policy.model, images).embeds
        for image, embed in zip(images, together, strict=True):
            alone = image_features(policy.model, [image]).embeds[0]
            torch.testing.assert_close(embed, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[3, 3], [4, 2, 4, 1, 2, 4], [2, 2, 5], [7]])
def test_windows_of_any_lengths_attend_as_each_alone(lengths: list[int]) -> None:
    """Values and gradients, in float64, against a softmax written out for each window."""
    draw = torch.Generator().manual_seed(sum(lengths))
    heads, width = 2, 3
    ends = [0, *accumulate(lengths)]
    parts = [
        torch.randn(1, heads, ends[-1], width, generator=draw, dtype=torch.float64)
        for _ in range(3)
    ]
    ours, theirs = ([part.clone().requires_grad_() for part in parts] for _ in range(2))
    attend: Any = AttentionInterface()[BATCHED_VISION]
    found, _ = attend(None, *ours, None, scaling=0.5, cu_seq_lens_q=torch.tensor(ends))
    expected = torch.cat(
        [
            torch.softmax(0.5 * q @ k.transpose(2, 3), -1) @ v
            for q, k, v in (
                [part[:, :, begin:end] for part in theirs] for begin, end in pairwise(ends)
            )
        ],
        dim=2,
    ).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    for out in (found, expected):
        (out * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_placeholders_and_images_must_agree(qwen3: Path) -> None:
    policy = load_policy(qwen3)
    image = policy.images.prepare(screenshot(1))
    token = policy.image_token_id
    with pytest.raises(ValueError, match="placeholders"):
        collate([[token] * 35], [[image]], pad_token=0, image_token=token, merge=2)


# --- the tiny model's folder ----------------------------------------------------------------


def test_the_folder_loads_through_the_auto_classes(qwen3: Path) -> None:
    assert AutoConfig.from_pretrained(qwen3).model_type == "qwen3_vl"
    model, report = AutoModelForImageTextToText.from_pretrained(qwen3, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert 400_000 < sum(parameter.numel() for parameter in model.parameters()) < 800_000
    assert AutoTokenizer.from_pretrained(qwen3).chat_template == tiny.CHAT_TEMPLATE
    assert AutoImageProcessor.from_pretrained(qwen3).patch_size == 14


@pytest.mark.parametrize(
    "text",
    [
        "click(63,91)",
        "drag(0,999,500,7)",
        "scroll(10,20,up)",
        "type(Hello, World (again) 12345 ~\n)",
        "key(ctrl+shift+s)",
        "done()",
        "click the red button",
        "  two  spaces\tand a tab",
        "quaint words, unheard-of!",
    ],
)
def test_decoding_gives_back_any_ascii_text(text: str) -> None:
    tokenizer = tiny.build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("model_type", list(tiny.TINY))
def test_a_tokenizer_json_is_the_tokenizer_where_the_folder_says_so(
    model_type: str, tmp_path: Path
) -> None:
    """For qwen3_5, AutoTokenizer would take the vocabulary alone and cut by rules of its own."""
    tiny.save(tmp_path, *tiny.build_tiny(0, tiny.TINY[model_type]), {})
    text = "click the red button<|im_end|>click(12,400)"
    saved = tiny.build_tokenizer().encode(text, add_special_tokens=False)
    assert load_policy(tmp_path, weights=False).encode(text) == saved


def test_a_click_is_five_tokens_and_an_end() -> None:
    tokenizer = tiny.build_tokenizer()
    assert len(tokenizer.encode("click(63,91)<|im_end|>", add_special_tokens=False)) == 6


def test_every_word_of_suite_mini_is_one_token() -> None:
    from scripts.grounding_screens import VOCABULARY

    tokenizer = tiny.build_tokenizer()
    for word in VOCABULARY:
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1, word
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word


def test_the_same_seed_builds_the_same_model() -> None:
    one, other, third = (weight_tensors(tiny.build_tiny(seed)[0]) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], third[name]) for name in one)


def test_structure_is_forbidden_and_text_is_not(qwen3: Path) -> None:
    policy = load_policy(qwen3)
    forbidden = {policy.tokenizer.decode([token]) for token in policy.forbidden_token_ids}
    assert forbidden >= {"<|image_pad|>", "<|video_pad|>", "<|pad|>", "<unk>", "<|im_start|>"}
    allowed = policy.tokenizer.encode("click(63,91)<|im_end|>", add_special_tokens=False)
    assert not set(allowed) & set(policy.forbidden_token_ids)
    assert policy.end_token_ids == (policy.tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_decoding_a_completion_drops_its_end(qwen3: Path) -> None:
    policy = load_policy(qwen3)
    tokens = policy.tokenizer.encode("click(63,91)<|im_end|>", add_special_tokens=False)
    assert policy.decode(tokens) == "click(63,91)"


def test_weight_tensors_name_tied_weights_once(qwen3: Path) -> None:
    names = weight_tensors(load_policy(qwen3).model)
    assert "lm_head.weight" not in names
    assert "model.language_model.embed_tokens.weight" in names


# --- folders that do not load -----------------------------------------------------------------


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _shrink(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))


def _deepen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 3
    config["text_config"].pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def _lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_drop("config.json"), "config.json"),
        (_drop("tokenizer.json"), "tokenizer.json"),
        (_drop("preprocessor_config.json"), "preprocessor_config.json"),
        (_drop("model.safetensors"), "safetensors"),
        (_drop("chat_template.jinja"), "chat_template"),
        (_write("config.json", "{"), "config.json"),
        (_write("config.json", "[]"), "config.json"),
        (_write("config.json", '{"model_type": "llama"}'), "llama"),
        (_write("tokenizer.json", "{}"), "tokenizer"),
        (_truncate, "weights|safetensors"),
        (_shrink, "shape|load"),
        (_deepen, "missing"),
        (_lose_a_shard, "model-00001-of-00002"),
    ],
)
def test_a_spoilt_folder_is_refused_by_name_in_one_line(
    qwen3: Path, tmp_path: Path, spoil: Callable[[Path], None], named: str
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(qwen3, folder)
    spoil(folder)
    with pytest.raises(ModelError, match=named) as caught:
        load_policy(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loaded_policy_survives_its_folder(qwen3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "short-lived"
    shutil.copytree(qwen3, folder)
    policy = load_policy(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(0)  # a tensor that still lies in the file would end the process here
    total = sum(float(tensor.abs().sum()) for tensor in weight_tensors(policy.model).values())
    assert total > 0


@pytest.mark.parametrize("name", ["builtin:huge", "/nowhere/at/all"])
def test_a_model_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="builtin:tiny"):
        load_policy(name)
