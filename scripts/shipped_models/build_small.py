"""Build `builtin:small`, a model of 4 M parameters that reads screens, from scratch.

    .venv/bin/python -m scripts.shipped_models.reading.corpus --out runs/corpus --rendered 12000 --pages 60
    .venv/bin/python -m scripts.shipped_models.reading.corpus --out runs/corpus --rendered 3000 --scale 1.5
    .venv/bin/python -m scripts.shipped_models.reading.corpus --out runs/corpus --rendered 400 --pages 5 --held-out
    .venv/bin/python scripts/shipped_models/build_small.py --corpus runs/corpus --out runs/small-base

Five stages, each of which begins with the weights of the one before:

    letters   dense text in one font: each image token says which characters it shows
    words     "click WORD" about drawn screens in one font, dense text in many
    fonts     what image tokens show in many fonts, drawn and as Chromium draws them; in every third
              update questions of every kind
    reading   "click WORD" and what else names a thing by its text, at a fifth of the rate: at the first
              stages' rate all kinds together learn nothing more
    all       questions about drawn screens, Chromium's, pages of MiniWoB++ and the embedded suites

The screens that Chromium draws are made first (`reading/corpus.py`). No question is part of a sequence: of a
page that takes several steps the base learns what is in sight, not what leads where. A build that was killed
goes on where it was; `log.jsonl` in its folder has the curve. Every figure is on words, fonts, sizes or seeds
that were never trained on.

One core, one thread; seconds are CPU time of training. On two: torchrun --nproc-per-node 2 SCRIPT ...
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.errors import UserError
from dart_cli.policy.images import ImagePreparer
from dart_cli.policy.loader import LoadedPolicy, load_policy
from scripts import tiny_model as tiny
from scripts.shipped_models.build_tiny import HELDOUT
from scripts.shipped_models.reading.drawn_screens import drawn_scene
from scripts.shipped_models.reading.embedded_screens import Suite, desk_scene, mini_scene
from scripts.shipped_models.reading.faces import Faces
from scripts.shipped_models.reading.glances import spelling_scene, typing_scene
from scripts.shipped_models.reading.questions import questions
from scripts.shipped_models.reading.scene import Query, Scene
from scripts.shipped_models.reading.sheets import ReadSheet, read_sheet, with_steps
from scripts.shipped_models.reading.store import load
from scripts.shipped_models.reading.training import Source, Stage, Trainer, rank
from scripts.shipped_models.reading.vocabulary import SMALL_WORDS

SIZES = tiny.TinySizes(
    text_hidden=192,
    text_layers=4,
    text_heads=4,
    text_mlp=512,
    vision_hidden=128,
    vision_layers=4,
    vision_heads=4,
    vision_mlp=384,
    patch=7,
    merge=2,
    screen=168,
)
"""Image tokens of 14 px, the size of letters, of patches of 7 px: with patches of 14 px and no merging,
letters came to a recall of 0.16 where these had 0.33, after 120 CPU seconds each."""

MOST_QUERIES = 12
"""Most questions about one screen."""

ONCE = ("count", "right", "double", "key", "scroll", "is")
"""Kinds of which a screen has one question at most: every screen has plenty."""

NAMING_KINDS = ("click", "part", "link", "tab", "row", "radio", "tick", "field")
"""Kinds that name a thing by what is written on it or beside it."""

STEPS = 0.15
"""Share of the questions with steps before them."""

SQUARE, PAGE = (126, 126), (160, 210)
FIRST_TEST = 1_000_000_000
"""Seeds of drawn screens from here on are for tests."""


def queries_of(scene: Scene, rng: Random) -> list[Query]:
    """Return questions about one screen."""
    queries: list[Query] = []
    for question in questions(scene, rng, 2 * MOST_QUERIES):
        if question.kind not in ONCE or all(question.kind != other.kind for other in queries):
            queries.append(question)
    return with_steps(queries[:MOST_QUERIES], rng, STEPS)


def drawn_sheet(
    preparer: ImagePreparer, size: tuple[int, int], faces: Faces, kind: str, rng: Random
) -> ReadSheet:
    """Return a drawn screen of the training split."""
    dense = kind == "dense"
    seed = rng.randrange(FIRST_TEST)
    scene = drawn_scene(seed, size=size, faces=faces, held_out_words=False, dense=dense)
    queries = [] if dense else queries_of(scene, rng)
    if kind == "words":
        queries = [query for query in queries if query.kind in NAMING_KINDS]
    return read_sheet(preparer, scene, queries)


def drawn_tests(preparer: ImagePreparer, size: tuple[int, int], faces: Faces) -> list[ReadSheet]:
    """Return drawn screens with words that were never trained on."""
    sheets = []
    for seed in range(FIRST_TEST, FIRST_TEST + 64):
        scene = drawn_scene(seed, size=size, faces=faces, held_out_words=True)
        sheets.append(read_sheet(preparer, scene, queries_of(scene, Random(seed))))
    return sheets


def stored_sheet(
    preparer: ImagePreparer, scenes: Sequence[Scene], most: int, rng: Random
) -> ReadSheet:
    """Return one of the scenes on disk: its own questions, and up to `most` about what is in sight."""
    return sheet_of(preparer, rng.choice(scenes), most, rng)


def naming_sheet(
    preparer: ImagePreparer, scenes: Sequence[Scene], most: int, rng: Random
) -> ReadSheet:
    """Return one of the scenes on disk with questions that name a thing by its text, and no others."""
    scene = rng.choice(scenes)
    queries = [query for query in queries_of(scene, rng) if query.kind in NAMING_KINDS]
    return read_sheet(preparer, scene, queries[:most])


def sheet_of(preparer: ImagePreparer, scene: Scene, most: int, rng: Random) -> ReadSheet:
    """Return a scene with its own questions, and at most `most` about what is in sight."""
    return read_sheet(preparer, scene, [*scene.queries, *queries_of(scene, rng)[:most]])


def _mini(seed: int, rng: Random) -> tuple[Scene, list[Query]]:
    scene = mini_scene(seed)
    return scene, with_steps(scene.queries, rng, STEPS)


def _typing(seed: int, rng: Random) -> tuple[Scene, list[Query]]:
    scene = typing_scene(seed, held_out=seed >= HELDOUT)
    return scene, with_steps(scene.queries, rng, STEPS)


def _spelling(seed: int, rng: Random) -> tuple[Scene, list[Query]]:
    scene = spelling_scene(seed, "many", held_out=seed >= HELDOUT)
    return scene, with_steps(scene.queries, rng, STEPS)


def _desk(suite: Suite, seed: int, rng: Random) -> tuple[Scene, list[Query]]:
    scene = desk_scene(suite, seed)
    return scene, [*scene.queries[:2], *queries_of(scene, rng)]


def _embedded(
    preparer: ImagePreparer,
    make: Callable[[int, Random], tuple[Scene, list[Query]]],
    rng: Random,
) -> ReadSheet:
    """Return a screen of an embedded suite, of the training split."""
    return read_sheet(preparer, *make(rng.randrange(HELDOUT), rng))


CORPUS = {
    "rendered 1": ("rendered", "train-1-*", MOST_QUERIES),
    "rendered 1.5": ("rendered", "train-1.5-*", MOST_QUERIES),
    "pages 1": ("pages", "*-1-*", 6),
}
"""Source -> folder of the corpus, names of shards, most questions about what is in sight."""

CORPUS_TESTS = {
    "Chromium, unseen words": ("rendered-test", "words-1-*", MOST_QUERIES),
    "Chromium, unseen font": ("rendered-test", "font-1-*", MOST_QUERIES),
    "Chromium, unseen size": ("rendered-test", "size-1-*", MOST_QUERIES),
    "pages, unseen seeds": ("pages-test", "*-1-*", 4),
}
"""The same of tests."""


def sources_of(preparer: ImagePreparer, corpus: Path) -> Mapping[str, Source]:
    """Return the sources from which stages draw, by name."""
    faces: tuple[Faces, ...] = ("one", "many")
    stored = {
        name: (load(corpus / folder, names), most) for name, (folder, names, most) in CORPUS.items()
    }
    embedded = {
        "mini": _mini,
        "desk": partial(_desk, "desk"),
        "apps": partial(_desk, "apps"),
        "typing": _typing,
        "spelling": _spelling,
    }
    return (
        {name: partial(_embedded, preparer, make) for name, make in embedded.items()}
        | {
            name: partial(stored_sheet, preparer, scenes, most)
            for name, (scenes, most) in stored.items()
            if len(scenes)
        }
        | {
            f"named {name}": partial(naming_sheet, preparer, scenes, most)
            for name, (scenes, most) in stored.items()
            if len(scenes)
        }
        | {
            f"{kind} {face} {size[0]}": partial(drawn_sheet, preparer, size, face, kind)
            for kind in ("dense", "words", "drawn")
            for face in faces
            for size in (SQUARE, PAGE)
        }
    )


def tests_of(preparer: ImagePreparer, corpus: Path) -> Mapping[str, Sequence[ReadSheet]]:
    """Return held-out screens by name."""
    tests = {}
    for name, (folder, names, most) in CORPUS_TESTS.items():
        if len(scenes := load(corpus / folder, names)):
            every = max(1, len(scenes) // 128)
            rng = Random(name)
            tests[name] = [sheet_of(preparer, scene, most, rng) for scene in list(scenes)[::every]]
    makers = {"mini": _mini, "desk": partial(_desk, "desk"), "typing": _typing}
    for name, make in {**makers, "spelling": _spelling}.items():
        rng = Random(name)
        tests[name] = [
            read_sheet(preparer, *make(seed, rng)) for seed in range(HELDOUT, HELDOUT + 64)
        ]
    return tests | {
        "unseen words": drawn_tests(preparer, SQUARE, "one"),
        "unseen words, many fonts": drawn_tests(preparer, SQUARE, "many"),
        "unseen font": drawn_tests(preparer, SQUARE, "held_out_font"),
        "unseen size": drawn_tests(preparer, SQUARE, "held_out_size"),
        "unseen words 160x210": drawn_tests(preparer, PAGE, "many"),
    }


def stages_of(hours: float) -> list[Stage]:
    """Return the stages of a build of this many CPU hours."""
    second = hours * 3600 / 100
    return [
        Stage(
            "letters",
            4 * second,
            {"dense one 126": 1.0},
            answers=False,
            log_tests=["unseen words"],
        ),
        Stage(
            "words",
            12 * second,
            {"words one 126": 0.7, "dense many 126": 0.3},
            log_tests=["unseen words", "unseen words, many fonts"],
        ),
        Stage(
            "fonts",
            14 * second,
            {
                "dense many 126": 0.25,
                "drawn many 126": 0.15,
                "rendered 1": 0.4,
                "pages 1": 0.1,
                "mini": 0.1,
            },
            answer_every=3,
            rate=0.7,
            log_tests=["unseen words, many fonts", "Chromium, unseen words"],
        ),
        Stage(
            "reading",
            20 * second,
            {
                "words many 126": 0.3,
                "named rendered 1": 0.35,
                "named pages 1": 0.1,
                "typing": 0.15,
                "spelling": 0.1,
            },
            rate=0.15,
            log_tests=["unseen words, many fonts", "typing", "spelling", "Chromium, unseen words"],
        ),
        Stage(
            "all",
            50 * second,
            {
                "drawn many 126": 0.1,
                "drawn many 160": 0.14,
                "rendered 1": 0.27,
                "pages 1": 0.22,
                "mini": 0.05,
                "typing": 0.05,
                "spelling": 0.03,
                "rendered 1.5": 0.04,
                "desk": 0.08,
                "apps": 0.02,
            },
            rate=0.3,
            falls=True,
            log_tests=["unseen words, many fonts", "mini", "typing", "spelling", *CORPUS_TESTS],
        ),
    ]


def finish(trainer: Trainer, policy: LoadedPolicy, build: dict[str, Any], out: Path) -> None:
    """Write the model in bfloat16, and the figures of the written weights by test and kind."""
    policy.model.to(torch.bfloat16).to(torch.float32)
    scores = {name: trainer.score(name) for name in trainer.tests}
    policy.model.to(torch.bfloat16)
    trainer.save(out, build)
    policy.model.to(torch.float32)
    weights = out / "model.safetensors"
    words = "unseen words, many fonts"
    result = {
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "bytes": weights.stat().st_size,
        "cpu_seconds": round(trainer.total),
        "hit_unseen_words": scores[words]["hit"],
        "hit_unseen_font": scores["unseen font"]["hit"],
        "hit_unseen_size": scores["unseen size"]["hit"],
        "letters_recall": scores[words]["letters_recall"],
        "tests": scores,
        **build,
    }
    (out.parent / f"{out.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "tests"}), flush=True)


def main() -> None:
    """Build one checkpoint and print its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float, default=2.0, help="CPU hours of training")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of Chromium's screens")
    parser.add_argument("--out", type=Path, required=True, help="folder of the build")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    start = arguments.out / "start"
    if not (start / "config.json").is_file():
        tokenizer = tiny.build_tokenizer(SMALL_WORDS, tiny.spelling(SMALL_WORDS))
        tiny.save(start, *tiny.build_tiny(arguments.seed, SIZES, tokenizer), {})
    policy = load_policy(start)
    print(sum(p.numel() for p in policy.model.parameters()), "parameters", flush=True)
    trainer = Trainer(
        policy,
        arguments.out,
        sources_of(policy.images, arguments.corpus),
        tests_of(policy.images, arguments.corpus),
        seed=arguments.seed,
    )
    stages = stages_of(arguments.hours)
    for stage in stages:
        for line in trainer.run(stage):
            print(line, flush=True)
    if rank():
        return
    build = {
        "script": "scripts/shipped_models/build_small.py",
        "seed": arguments.seed,
        "stages": [[stage.name, round(stage.seconds)] for stage in stages],
    }
    finish(trainer, policy, build, arguments.out / "model")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
