"""Folders of every supported class, laid out as real checkpoints are, load through the same code."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from bus.errors import ActionError, ModelError
from bus.messages import Turn
from dart_cli.config.architecture import HYBRID, NEWER
from dart_cli.config.model_folder import MODEL_TYPES
from dart_cli.config.schema import Config
from dart_cli.language.coordinates import make_coordinate_map, resize_of
from dart_cli.policy.forward import image_features, logits, rope_positions
from dart_cli.policy.loader import LoadedPolicy, load_policy, weight_tensors
from dart_cli.policy.prompt import PromptRenderer
from scripts.small_models import EMBEDDING_ROWS, FAMILIES, build

Family = Callable[[str], Path]

every_family = pytest.mark.parametrize("model_type", FAMILIES)

FACTOR = {"qwen2_vl": 28, "qwen2_5_vl": 28, **dict.fromkeys(NEWER, 32)}
BOUNDS = {
    "qwen2_vl": (3136, 1003520),
    "qwen2_5_vl": (3136, 2116800),
    **dict.fromkeys(NEWER, (65536, 16777216)),
}
TOKENS = {  # (width, height) of a screen -> image tokens, by hand: sides to multiples of the factor
    "qwen2_vl": {(448, 224): 16 * 8, (500, 300): 18 * 11, (100, 60): 4 * 2},
    "qwen2_5_vl": {(448, 224): 16 * 8, (500, 300): 18 * 11, (100, 60): 4 * 2},
    # 100 x 60 has too few pixels: times sqrt(65536 / 6000) = 3.305, then up: 352 x 224
    **{kind: {(448, 224): 14 * 7, (500, 300): 16 * 9, (100, 60): 11 * 7} for kind in NEWER},
}


def screenshot(seed: int, width: int, height: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_families_are_those_that_load() -> None:
    assert tuple(FAMILIES) == MODEL_TYPES


# --- prompts ------------------------------------------------------------------------------------


@every_family
def test_a_prompt_has_as_many_placeholders_as_the_class_cuts_patches(
    model_type: str, family: Family
) -> None:
    policy = load_policy(family(model_type))
    assert (policy.images.factor, policy.images.bounds) == (FACTOR[model_type], BOUNDS[model_type])
    renderer = PromptRenderer(policy)
    for size, tokens in TOKENS[model_type].items():
        picture = screenshot(1, *size)
        prompt = renderer.render("click the button", [], picture)
        assert prompt.token_ids.count(policy.image_token_id) == tokens
        prepared = policy.images.prepare(picture)
        assert prepared.tokens == tokens
        side = policy.images.patch
        assert prepared.patches.shape == (4 * tokens, 3 * 2 * side * side)


@every_family
def test_the_text_of_a_prompt_is_the_classs_own(model_type: str, family: Family) -> None:
    policy = load_policy(family(model_type))
    turns = [
        Turn(text="Action: click(1)", screenshot=screenshot(1, 448, 224)),
        Turn(text="Action: wait()"),
    ]
    prompt = PromptRenderer(policy).render("click the box", turns, screenshot(2, 500, 300))
    pads = TOKENS[model_type]

    def image(size: tuple[int, int]) -> str:
        return "<|vision_start|>" + "<|image_pad|>" * pads[size] + "<|vision_end|>"

    system = FAMILIES[model_type].system
    expected = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    expected += (
        f"<|im_start|>user\n{image((448, 224))}click the box<|im_end|>\n"
        "<|im_start|>assistant\nAction: click(1)<|im_end|>\n"
        "<|im_start|>assistant\nAction: wait()<|im_end|>\n"
        f"<|im_start|>user\n{image((500, 300))}<|im_end|>\n"
        f"<|im_start|>assistant\n{FAMILIES[model_type].reply}"
    )
    assert policy.tokenizer.decode(prompt.token_ids) == expected


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="AutoProcessor needs torchvision"
)
@every_family
def test_prompt_and_pixels_are_those_of_the_classs_processor(
    model_type: str, family: Family
) -> None:
    policy = load_policy(family(model_type))
    processor = AutoProcessor.from_pretrained(family(model_type))
    pictures = [screenshot(1, 448, 448), screenshot(2, 224, 448)]  # sizes that need no resampling
    turns = [Turn(text="Action: wait()", screenshot=pictures[0])]
    prompt = PromptRenderer(policy).render("click the box", turns, pictures[1])
    image, text = {"type": "image"}, {"type": "text", "text": "click the box"}
    answer = [{"type": "text", "text": "Action: wait()"}]
    messages = [
        {"role": "user", "content": [image, text]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [image]},
    ]
    template = processor.chat_template or policy.tokenizer.chat_template
    theirs = processor(
        text=processor.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        ),
        images=[Image.open(io.BytesIO(picture)) for picture in pictures],
        return_tensors="pt",
    )
    assert theirs["input_ids"][0].tolist() == prompt.token_ids
    prepared = [policy.images.prepare(picture) for picture in prompt.images]
    assert theirs["image_grid_thw"].tolist() == [list(each.grid) for each in prepared]
    patches = torch.cat([each.patches for each in prepared])
    torch.testing.assert_close(theirs["pixel_values"], patches, atol=1e-5, rtol=0)


@every_family
def test_resized_pixels_are_those_of_the_classs_image_processor(
    model_type: str, family: Family
) -> None:
    policy = load_policy(family(model_type))
    settings = json.loads((family(model_type) / "preprocessor_config.json").read_text())
    processor = Qwen2VLImageProcessorPil.from_dict(settings)
    for size in TOKENS[model_type]:
        picture = screenshot(3, *size)
        theirs = processor(images=[Image.open(io.BytesIO(picture))], return_tensors="np")
        mine = policy.images.prepare(picture)
        assert list(mine.grid) == theirs["image_grid_thw"][0].tolist()
        np.testing.assert_allclose(mine.patches.numpy(), theirs["pixel_values"], atol=1e-5)


# --- the forward pass ---------------------------------------------------------------------------


def prompts_of(policy: LoadedPolicy) -> list[Any]:
    renderer = PromptRenderer(policy)
    turns = [
        Turn(text="Action: click(1)", screenshot=screenshot(1, 448, 224)),
        Turn(text="Action: wait()", screenshot=screenshot(2, 224, 448)),
    ]
    return [
        renderer.render("click the red box", turns, screenshot(3, 500, 300)),
        renderer.render("start", [], screenshot(1, 448, 224)),
        renderer.render("click", turns[:1], screenshot(2, 224, 448)),
    ]


@every_family
def test_our_forward_is_the_unpatched_model(model_type: str, family: Family) -> None:
    policy = load_policy(family(model_type))
    plain = AutoModelForImageTextToText.from_pretrained(family(model_type)).eval()
    prompts = prompts_of(policy)
    inputs = policy.inputs([p.token_ids for p in prompts], [p.images for p in prompts])
    assert len(inputs.images) == 3  # of six places
    shown = [policy.images.prepare(blob) for prompt in prompts for blob in prompt.images]
    with torch.inference_mode():
        mine = logits(policy.model, inputs, last=4)
        theirs = plain(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            mm_token_type_ids=(inputs.input_ids == policy.image_token_id).int(),
            pixel_values=torch.cat([image.patches for image in shown]),
            image_grid_thw=torch.tensor([image.grid for image in shown]),
        ).logits[:, -4:]
    # The padding moves the bounds of a recurrent layer's chunks, which sums its float32 in another order.
    torch.testing.assert_close(mine, theirs, atol=5e-5 if model_type in HYBRID else 2e-5, rtol=1e-5)


@every_family
def test_every_image_and_its_place_matter(model_type: str, family: Family) -> None:
    """So that agreement on prompts with images is worth something."""
    policy = load_policy(family(model_type))
    [prompt, *_] = prompts_of(policy)

    def answer(images: list[bytes]) -> torch.Tensor:
        with torch.inference_mode():
            inputs = policy.inputs([prompt.token_ids], [images])
            return logits(policy.model, inputs, last=1)[0, 0].log_softmax(-1)

    whole = answer(prompt.images)
    for index, size in enumerate([(448, 224), (224, 448), (500, 300)]):
        changed = list(prompt.images)
        changed[index] = screenshot(9, *size)
        assert (answer(changed) - whole).abs().max() > 1e-3, index


@every_family
def test_positions_are_those_of_the_model(model_type: str, family: Family) -> None:
    policy = load_policy(family(model_type))
    [prompt, *_] = prompts_of(policy)
    grids = [policy.images.prepare(blob).grid for blob in prompt.images]
    mine, following = rope_positions(prompt.token_ids, grids, policy.image_token_id, 2)
    tokens = torch.tensor([prompt.token_ids])
    inner: Any = policy.model.model
    theirs, delta = inner.get_rope_index(
        tokens, (tokens == policy.image_token_id).int(), image_grid_thw=torch.tensor(grids)
    )
    assert torch.equal(mine, theirs[:, 0])
    assert following == len(prompt.token_ids) + int(delta)


def test_deepstack_features_come_with_qwen3_alone(family: Family) -> None:
    levels = {}
    for model_type in FAMILIES:
        policy = load_policy(family(model_type))
        with torch.inference_mode():
            image = policy.images.prepare(screenshot(1, 448, 224))
            levels[model_type] = len(image_features(policy.model, [image]).deepstack)
    deep = ("qwen3_vl", "qwen3_vl_moe")
    assert levels == {model_type: 2 if model_type in deep else 0 for model_type in FAMILIES}


# --- vocabulary ---------------------------------------------------------------------------------


@every_family
def test_only_text_and_ends_can_be_sampled(model_type: str, family: Family) -> None:
    policy = load_policy(family(model_type))
    known = policy.tokenizer.get_vocab()
    assert set(policy.end_token_ids) == {known["<|im_end|>"], known["<|endoftext|>"]}
    forbidden = set(policy.forbidden_token_ids)
    structure = ("image_pad", "video_pad", "vision_start", "vision_end", "vision_pad", "im_start")
    assert forbidden >= {known[f"<|{name}|>"] for name in structure}
    assert forbidden >= set(range(len(known), EMBEDDING_ROWS))  # rows that no token stands for
    assert known["<|box_start|>"] not in forbidden  # UI-TARS writes them
    assert not forbidden & set(
        policy.encode_completion("Thought: é ü 12\nAction: click(start_box='(1,2)')")
    )


# --- weights ------------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("tied", [True, False])
def test_shards_in_bfloat16_load_tied_or_not(
    model_type: str, tied: bool, tmp_path: Path, family: Family
) -> None:
    folder = build(model_type, tmp_path, dtype=torch.bfloat16, tied=tied, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    half, single = load_policy(folder, "auto"), load_policy(folder, "float32")
    assert half.model.dtype == torch.bfloat16
    held, wide = weight_tensors(half.model), weight_tensors(single.model)
    assert ("lm_head.weight" in held) is not tied
    assert all(torch.equal(held[name].float(), value) for name, value in wide.items())
    original = weight_tensors(load_policy(family(model_type)).model)
    shared = original.keys() & wide.keys()
    assert all(torch.equal(original[name].bfloat16(), held[name]) for name in shared - {"lm_head"})


def test_checkpoints_have_the_names_of_real_ones(family: Family) -> None:
    """Flat names in the older classes; transformers maps them, a reader of files must too."""
    from safetensors import safe_open

    first = {
        "qwen2_vl": "visual.",
        "qwen2_5_vl": "visual.",
        **dict.fromkeys(NEWER, "model.visual."),
    }
    for model_type, prefix in first.items():
        with safe_open(family(model_type) / "model.safetensors", "pt") as file:
            names = list(file.keys())
        assert any(name.startswith(prefix) for name in names)


# --- folders ------------------------------------------------------------------------------------


def test_a_processor_saved_by_transformers_5_is_read(tmp_path: Path, family: Family) -> None:
    shutil.copytree(family("qwen3_vl"), tmp_path / "new")
    old = tmp_path / "new" / "preprocessor_config.json"
    part = json.loads(old.read_text())
    (tmp_path / "new" / "processor_config.json").write_text(json.dumps({"image_processor": part}))
    old.unlink()
    assert load_policy(tmp_path / "new").images.bounds == BOUNDS["qwen3_vl"]


def test_a_template_in_a_file_of_its_own_is_read(tmp_path: Path, family: Family) -> None:
    shutil.copytree(family("qwen3_vl"), tmp_path / "m")
    assert "chat_template" not in json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert load_policy(tmp_path / "m").tokenizer.chat_template
    (tmp_path / "m" / "chat_template.json").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        load_policy(tmp_path / "m")


@pytest.mark.parametrize("model_type", ["llava", "qwen3_next", "qwen2", ""])
def test_another_class_is_refused_in_one_line_that_names_ours(
    model_type: str, tmp_path: Path, family: Family
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(family("qwen3_vl"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    with pytest.raises(ModelError, match="take a checkpoint of class") as caught:
        load_policy(folder)
    assert all(f" {name} (" in str(caught.value) for name in FAMILIES)
    assert (model_type or "missing") in str(caught.value)
    assert "\n" not in str(caught.value)


# --- coordinates --------------------------------------------------------------------------------


@every_family
def test_resized_numbers_are_pixels_of_what_the_folders_preprocessor_makes(
    model_type: str, family: Family
) -> None:
    policy = load_policy(family(model_type))
    screens = resize_of(
        Config.model_validate(
            {"model": {"path": str(family(model_type))}, "policy": {"coordinates": "resized"}}
        )
    )
    assert screens == policy.images.screens == (FACTOR[model_type], *BOUNDS[model_type])
    coordinates = make_coordinate_map("resized", 100, 60, screens)
    assert (coordinates.grid_width, coordinates.grid_height) == policy.images.resized(100, 60)
    assert coordinates.to_screen(coordinates.grid_width - 1, 0) == (99, 0)


def test_a_thousand_means_the_far_edge_and_half_of_it_the_middle() -> None:
    coordinates = make_coordinate_map("thousand", 1920, 1080)
    assert coordinates.to_screen(0, 0) == (0, 0)
    assert coordinates.to_screen(1000, 1000) == (1919, 1079)
    assert coordinates.to_screen(500, 500) == (960, 540)
    assert all(abs(coordinates.to_screen(n, 0)[0] - n * 1.92) < 2 for n in range(1001))  # pixels
    with pytest.raises(ActionError, match="0 to 1000"):
        coordinates.to_screen(1001, 0)
