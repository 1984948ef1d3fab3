"""The base of the tiny models: what a pack of questions is trained on, of both classes, and that it learns."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from dart_cli.policy.forward import encoder_outputs, image_features, last_hidden
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.packed import packed_hidden
from scripts import tiny_model as tiny
from scripts.shipped_models.build_tiny import (
    POINTING_HEADS,
    Packer,
    Sheet,
    pointing_loss,
    sheet,
    train,
)


@pytest.fixture(scope="module", params=list(tiny.TINY))
def policy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LoadedPolicy:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save(folder, *tiny.build_tiny(0, tiny.TINY[request.param]), {})
    return load_policy(folder)


def packer_of(policy: LoadedPolicy) -> Packer:
    return Packer(policy.tokenizer, policy.image_token_id, policy.images.merge)


def sheets_of(policy: LoadedPolicy, seeds: range, clicks: int = 3) -> list[Sheet]:
    rng = Random(0)
    return [sheet(policy.images, seed, rng, clicks=clicks, extras=1) for seed in seeds]


def test_every_class_has_the_same_words_and_computes_with_about_as_many_parameters(
    policy: LoadedPolicy,
) -> None:
    """Of a mixture, a token passes two of eight experts."""
    named = policy.model.named_parameters()
    count = sum(each.numel() // (4 if ".experts." in name else 1) for name, each in named)
    assert 600_000 < count < 640_000
    words = policy.tokenizer.tokenize("click the red button<|im_end|>click(12,400)")
    assert words == [
        "click",
        " the",
        " red",
        " button",
        "<|im_end|>",
        "click(",
        "12",
        ",",
        "400",
        ")",
    ]


def test_a_question_in_a_pack_is_computed_as_it_is_asked_alone(policy: LoadedPolicy) -> None:
    packed = packer_of(policy).pack(sheets_of(policy, range(3)), Random(1))
    layout = packed.inputs.layout
    with torch.no_grad():
        hidden = packed_hidden(policy.model, packed.inputs)
        roots = [node for node, parent in enumerate(layout.parents) if parent < 0]
        for node, parent in enumerate(layout.parents):
            place = layout.path(node)
            image = packed.inputs.images[roots.index(parent if parent >= 0 else node)]
            inputs = policy.inputs_of([packed.inputs.input_ids[place].tolist()], [[image]])
            alone = last_hidden(policy.model, inputs, last=len(place))[0]
            assert torch.equal(inputs.position_ids[:, 0], packed.inputs.position_ids[:, place])
            torch.testing.assert_close(hidden[place], alone, atol=2e-4, rtol=1e-4)


def test_two_heads_are_taught_what_the_librarys_own_attention_weights_say(
    policy: LoadedPolicy,
) -> None:
    """The loss is the cross entropy of its weights, over the tokens of the image alone."""
    packed = packer_of(policy).pack(sheets_of(policy, range(2), clicks=1), Random(1))
    layout = packed.inputs.layout
    attention: Any = policy.model.model.language_model.layers[-1].self_attn  # type: ignore[union-attr]
    given: dict[str, Any] = {}
    hook = attention.register_forward_pre_hook(
        lambda _module, _args, keywords: given.update(keywords), with_kwargs=True
    )
    with torch.no_grad():
        packed_hidden(policy.model, packed.inputs)
        loss = pointing_loss(attention, given, packed)
    hook.remove()
    library = AutoModelForImageTextToText.from_pretrained(
        policy.folder, attn_implementation="eager"
    ).eval()
    losses = []
    for click, owner, cells in zip(packed.clicks, packed.sheets, packed.cells, strict=True):
        place = layout.path(int(packed.nodes[click]))
        image = packed.inputs.images[int(owner)]
        with torch.no_grad():
            features = image_features(policy.model, [image])
            weights = library(
                input_ids=packed.inputs.input_ids[place][None],
                position_ids=packed.inputs.position_ids[:, place][:, None],
                mm_encoder_outputs=encoder_outputs(features, [0]),
                output_attentions=True,
            ).attentions[-1][0]  # [heads, P, P]
        at = int((place == click).nonzero())
        shown = packed.inputs.input_ids[place] == policy.image_token_id
        seen = F.normalize(weights[:POINTING_HEADS, at, shown].double(), p=1, dim=-1)
        losses.append(-(cells * seen.log()).sum(-1).mean())
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)


def test_some_seconds_of_training_lower_the_loss(policy: LoadedPolicy) -> None:
    packer = packer_of(policy)
    packed = packer.pack(sheets_of(policy, range(5_000_000, 5_000_016)), Random(1))

    def loss() -> float:
        with torch.no_grad():
            return packer.loss(policy.model, packed).item()

    def draw(rng: Random, _progress: float) -> Sheet:
        return sheet(policy.images, rng.randrange(1000), rng, clicks=3)

    before = loss()
    list(train(policy, draw, [], seed=0, seconds=4.0))
    assert loss() < before - 0.1
