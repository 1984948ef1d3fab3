"""The words of other tools: each has an answer, every key in it exists, and the page says the same."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from bus.errors import ConfigError
from dart_cli.config.load import default_config
from dart_cli.config.schema import section_types
from dart_cli.config.unknown_keys import WORDS, words_page

ROOT = Path(__file__).parents[2]
KEYS = {
    f"{section}.{key}" for section, kind in section_types().items() for key in kind.model_fields
}

ANSWERS = [
    ("train.learning_rate=1", "unknown key train.learning_rate; dart's name for it is train.lr"),
    ("learning-rate=1", "want SECTION.KEY=VALUE; dart's name for it is train.lr"),
    ("train.batch_size=3", "dart's names for it are data.groups_per_batch and data.group_size"),
    ("trainer.total_epochs=3", "total_epochs is train.updates"),
    ("num_generations=2", "dart's name for it is data.group_size"),
    ("train.max_steps=4", "dart's name for it is train.updates"),
    ("env.max_steps=4", "an episode has at most the max_steps of its task"),
    ("max_completion_length=4", "dart's name for it is rollout.max_tokens"),
    ("train.beta=0", "dart's name for it is train.kl_beta"),
    ("train.kl_coef=0", "dart's name for it is train.kl_beta"),
    ("temperature=1", "did you mean rollout.temperature"),
    ("actor_rollout_ref.actor.optim.lr=1", "[actor_rollout_ref] of another tool"),
    ("actor_rollout_ref.actor.optim.lr=1", "lr is train.lr"),
    ("actor_rollout_ref.rollout.n=8", "n is data.group_size"),
    ("algo.lr=1", "lr is train.lr"),
    ("algorithm.gamma=0.9", "gamma: nothing is discounted"),
    ("sampling.max_tokens=1", "max_tokens is rollout.max_tokens"),
    ("trian.lr=1", "unknown section [trian]; did you mean train?"),
]


@pytest.mark.parametrize(("override", "answer"), ANSWERS, ids=[each[0] for each in ANSWERS])
def test_a_word_of_another_tool_is_answered_with_our_key(override: str, answer: str) -> None:
    with pytest.raises(ConfigError) as refused:
        default_config([override])
    assert answer in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_key_of_the_table_exists_and_every_word_has_one_answer() -> None:
    for word in WORDS:
        assert KEYS.issuperset(word.ours), word.theirs
        assert word.ours or word.how, word.theirs
        named = re.findall(r"\b((?:[a-z]+\.)+[a-z_]+)\b", word.how)
        known = {each for each in named if each.partition(".")[0] in section_types()}
        assert KEYS.issuperset(known), word.theirs
    names = Counter(name for word in WORDS for name in word.theirs)
    assert [name for name, times in names.items() if times > 1] == []


def test_a_word_is_no_key_of_ours_in_another_meaning() -> None:
    """A key that exists is never an error, so its word would never be read; a section's name alone is."""
    for word in WORDS:
        for name in word.theirs:
            assert name not in KEYS
            ours = {key.rpartition(".")[2] for key in KEYS}
            named = (*word.ours, *word.how.split())
            assert name not in ours or any(key.endswith(f".{name}") for key in named), name


def test_a_section_of_another_tool_names_the_first_few_of_its_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        default_config(
            ["algo.lr=1", "algo.gamma=1", "algo.beta=1", "algo.loss_type=1", "algo.banana=1"]
        )
    assert str(refused.value).startswith(
        "unknown section [algo] of another tool (docs/your-words.md): lr is train.lr; gamma: nothing is "
        "discounted: all steps of a trajectory have its advantage; beta is train.kl_beta, and 1 more"
    )


def test_the_page_is_what_the_table_says() -> None:
    written = (ROOT / "docs" / "your-words.md").read_text(encoding="utf-8")
    assert written == words_page(), "run: python -m dart_cli.cli.reference"
