"""Sheets and training of the small base: targets, prompts, probabilities, a build that goes on."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch

from bus.errors import UserError
from dart_cli.config.schema import PolicyConfig
from dart_cli.language.vocabulary import END
from dart_cli.policy.forward import image_features, logits
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import make_renderer
from scripts import tiny_model as tiny
from scripts.shipped_models.build_tiny import SPREAD, Packer
from scripts.shipped_models.reading.drawn_screens import drawn_scene
from scripts.shipped_models.reading.faces import DEJAVU
from scripts.shipped_models.reading.muon import Muon
from scripts.shipped_models.reading.scene import Glyph, Query, Scene, Thing
from scripts.shipped_models.reading.sheets import (
    CHARACTERS,
    LOOKS,
    DenseHeads,
    ReadSheet,
    letter_loss,
    letter_targets,
    place_loss,
    read_sheet,
)
from scripts.shipped_models.reading.training import Stage, Trainer, answer_chances
from scripts.shipped_models.reading.vocabulary import SMALL_WORDS

pytestmark = pytest.mark.skipif(
    not (DEJAVU / "DejaVuSans.ttf").exists(), reason="apt install fonts-dejavu-core"
)

SIZES = tiny.TinySizes(
    text_hidden=48, text_layers=2, text_mlp=64, vision_hidden=32, vision_mlp=64, patch=7
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    folder = tmp_path_factory.mktemp("small")
    tokenizer = tiny.build_tokenizer(SMALL_WORDS, tiny.spelling(SMALL_WORDS))
    tiny.save(folder, *tiny.build_tiny(0, SIZES, tokenizer), {})
    return load_policy(folder)


def scene_of(asked: tuple[Query, ...] = ()) -> Scene:
    drawn = drawn_scene(3, size=(56, 28), faces="one", held_out_words=False, dense=True)
    glyphs = (Glyph("A", 16.0, 7.0), Glyph("b", 27.0, 7.0), Glyph("~", 55.0, 27.0))
    things = (Thing("button", "A", (14, 0, 28, 14), colour="gray"),)
    return Scene("a", drawn.png, glyphs, things, asked, unread=((0, 14, 14, 28),))


def test_spelling_keeps_known_words_and_coordinates_whole_and_nothing_within_a_word() -> None:
    tokenizer = tiny.build_tokenizer(SMALL_WORDS, tiny.spelling(SMALL_WORDS))
    for text, tokens in (
        ("Click on the", ["Click", " on", " the"]),
        ("tonight", list("tonight")),
        ("click(12,345)", ["click(", "12", ",", "345", ")"]),
        ("type(42)", ["type(", "4", "2", ")"]),
    ):
        ids = tokenizer.encode(text)
        assert tokenizer.convert_ids_to_tokens(ids) == tokens
        assert tokenizer.decode(ids) == text


def test_characters_and_looks_are_those_of_their_token(policy: LoadedPolicy) -> None:
    sheet = read_sheet(policy.images, scene_of(), [])  # 4 x 2 tokens of 14 px
    target, weight = letter_targets([sheet])
    assert target.shape == (8, 2, CHARACTERS)
    assert target[1, 0, ord("A") - 32] == 1
    assert target[1, 1, ord("b") - 32] == 1
    assert target[7, 1, ord("~") - 32] == 1
    assert target[..., 0].sum() == 16 - 3  # all other halves hold none
    assert weight[4].tolist() == [0, 0]  # unread
    role, colour = LOOKS["role"], LOOKS["colour"]
    assert sheet.looks[1].tolist() == [role.index("button"), colour.index("grey"), 0, 0]
    assert sheet.looks[0].tolist() == [0, 0, 0, 0]
    assert sheet.spans[1].tolist() == [[0.25, 0.5], [0.0, 0.5]]
    assert sheet.spans[0].tolist() == [[0.0, 0.25], [0.0, 0.5]]


def test_the_loss_of_places_is_that_of_a_plain_computation(policy: LoadedPolicy) -> None:
    torch.manual_seed(0)
    heads = DenseHeads(48)
    sheet = read_sheet(policy.images, scene_of(), [])
    numbers = torch.randn(1000, 48)
    with torch.no_grad():
        shown = torch.cat(image_features(policy.model, [sheet.image]).embeds)
        loss = place_loss(heads, shown, [sheet], numbers)
        said = heads.places(shown).double().reshape(16, 48) @ numbers.double().T
    cells = product(((0.0, 0.5), (0.5, 1.0)), ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)))
    spans = [span for row, column in cells for span in (column, row)]
    total = 0.0
    for axis, (low, high) in enumerate(spans):
        middle, half = (low + high) / 2, (high - low) / 2
        bell = [
            math.exp(-0.5 * (z / SPREAD) ** 2) if abs(z) <= 0.85 else 0.0
            for z in (((at + 0.5) / 1000 - middle) / half for at in range(1000))
        ]
        logprobs = said[axis].log_softmax(0).tolist()
        for density, logprob in zip(bell, logprobs, strict=True):
            if share := density / sum(bell):
                total += share * (math.log(share) - logprob)
    assert loss.item() == pytest.approx(total / 16, rel=1e-3)


def test_a_step_of_muon_is_that_of_torch() -> None:
    """But for its bfloat16, some hundredths of a step."""
    for rows, columns in ((24, 64), (64, 24)):
        torch.manual_seed(rows)
        start = torch.randn(rows, columns)
        ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
        steps = (
            (ours, Muon([ours], lr=4e-3)),
            (
                theirs,
                torch.optim.Muon(
                    [theirs], lr=4e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
                ),
            ),
        )
        for _ in range(3):
            gradient = torch.randn(rows, columns)
            for matrix, optimizer in steps:
                matrix.grad = gradient.clone()
                optimizer.step()
        assert (ours - theirs).norm() < 0.03 * (ours - start).norm()


def test_the_loss_of_letters_is_that_of_a_plain_computation(policy: LoadedPolicy) -> None:
    torch.manual_seed(0)
    heads = DenseHeads(48)
    sheet = read_sheet(policy.images, scene_of(), [])
    with torch.no_grad():
        shown = torch.cat(image_features(policy.model, [sheet.image]).embeds)
        loss = letter_loss(heads, shown, [sheet])
        said = heads.letters(shown).double().reshape(8, 2, CHARACTERS).softmax(-1)
    total = weights = 0.0
    held = {(1, 0): "A", (1, 1): "b", (7, 1): "~"}
    for token in range(8):
        for half in range(2):
            character = held.get((token, half))
            weight = 0.0 if token == 4 else 1.0 if character else 0.15
            kind = ord(character) - 32 if character else 0
            total -= weight * said[token, half, kind].log().item()
            weights += weight
    assert loss.item() == pytest.approx(total / weights, rel=1e-5)


@pytest.mark.parametrize("before", [None, (), ("click(1,2)", "type(x)")])
def test_questions_are_asked_as_the_engine_renders_them(
    policy: LoadedPolicy, before: tuple[str, ...] | None
) -> None:
    """The probability of an answer is that of the tokens after the renderer's prompt."""
    asked = Query("type the word", "type(ab)", (), "type", before)
    other = Query("what is here", "answer(no)", (), "read")
    scene = scene_of((other, asked))
    sheet = read_sheet(policy.images, scene, scene.queries)
    packer = Packer(policy.tokenizer, policy.image_token_id, policy.images.merge)
    template = "{instruction}" if before is None else "{instruction}\n{previous}"
    renderer = make_renderer(policy, PolicyConfig(action_parser="compact", template=template))
    steps = "\n".join(f"Step {n}: {each}" for n, each in enumerate(before or (), 1)) or "None"
    prompt = renderer.render(
        asked.text, (), scene.png, previous=steps if before is not None else ""
    )
    answer = policy.encode("type(ab)" + END)
    sequence = [*prompt.token_ids, *answer]
    with torch.no_grad():
        inputs = policy.inputs([sequence], [[scene.png]])
        said = logits(policy.model, inputs, last=len(answer) + 1)[0, :-1]
    logprobs = said.log_softmax(-1)
    told = logprobs.gather(1, torch.tensor(answer)[:, None]).sum().exp().item()
    assert answer_chances(policy, packer, [sheet])["type"][0] == pytest.approx(told, rel=1e-4)


def draw(policy: LoadedPolicy, rng: Random) -> ReadSheet:
    scene = drawn_scene(rng.randrange(100), size=(56, 56), faces="one", held_out_words=False)
    asked = [Query("click it", "click({})", ((3, 3, 30, 20),), "click")]
    return read_sheet(policy.images, scene, asked)


def test_a_build_that_was_ended_goes_on_where_it_was(policy: LoadedPolicy, tmp_path: Path) -> None:
    sources = {"drawn": partial(draw, policy)}
    tests = {"words": [draw(policy, Random(1))]}
    stage = Stage("words", 0.2, {"drawn": 1.0}, log_tests=["words"])
    first = Trainer(policy, tmp_path, sources, tests, seed=0)
    lines = list(first.run(stage))
    assert '"words"' in lines[-1]
    kept = {name: value.clone() for name, value in policy.model.state_dict().items()}
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
    again = Trainer(policy, tmp_path, sources, tests, seed=0)
    assert list(again.run(stage)) == []  # it was over
    assert again.step == first.step
    assert all(torch.equal(kept[name], value) for name, value in policy.model.state_dict().items())
    assert (tmp_path / "words" / "model.safetensors").is_file()


def test_what_a_stage_lacks_is_named_with_its_fix(policy: LoadedPolicy, tmp_path: Path) -> None:
    trainer = Trainer(policy, tmp_path, {"drawn": partial(draw, policy)}, {}, seed=0)
    with pytest.raises(UserError, match=r"draws rendered 1, .*reading\.corpus"):
        list(trainer.run(Stage("all", 1.0, {"drawn": 0.5, "rendered 1": 0.5})))


def test_answers_that_were_drawn_at_random_are_no_hits(policy: LoadedPolicy) -> None:
    box = (3.0, 3.0, 30.0, 20.0)
    asked = (
        Query("click it", "click({})", (box,), "click"),
        Query("do it all", "click({})", (box,), "page:click-test"),
        Query("type it", "type(a)", (), "type"),
    )
    sheet = read_sheet(policy.images, scene_of(asked), asked)
    packer = Packer(policy.tokenizer, policy.image_token_id, policy.images.merge)
    told = answer_chances(policy, packer, [sheet])
    assert told["hit"] == told["click"]
    assert told["all"][1] == 3
