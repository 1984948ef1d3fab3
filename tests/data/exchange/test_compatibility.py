"""Foreign tokens that the run's model cannot process are refused."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from bus.errors import ExchangeError
from dart_cli.config.schema import Config
from dart_cli.data.checks import model_facts
from dart_cli.data.exchange.parquet_schema import Trajectory
from dart_cli.data.exchange.parquet_write import write_folder
from dart_cli.data.exchange.transfer import (
    import_folder,
)
from dart_cli.policy.loader import load_policy
from envs.contract.blobs import content_hash
from tests.copies import copy_with
from tests.data.exchange.parts import step, trajectory, written


def test_the_tokens_that_no_policy_samples_are_those_that_the_trainer_refuses() -> None:
    facts = model_facts(Config())
    assert facts is not None
    assert facts.forbidden == set(load_policy("builtin:tiny").forbidden_token_ids)


def one_screen(size: tuple[int, int]) -> Trajectory:
    """A success of one step on a screen of that size."""
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    shot = file.getvalue()
    return replace(trajectory(), steps=[step(0, shot, [])], images={content_hash(shot): shot})


def test_tokens_that_the_model_cannot_take_are_refused(tmp_path: Path, config: Config) -> None:
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"engine": "transformers"})}
    )
    facts = model_facts(config)
    assert facts is not None
    with pytest.raises(ExchangeError, match=r"column prompt_token_ids: \d image placeholders"):
        import_folder(config, written(tmp_path / "a", trajectory()))
    one = trajectory(steps=1)
    fitting = [facts.image_token, 9]  # 28 x 28 pixels are one place
    fits = replace(one, steps=[replace(one.steps[0], prompt_token_ids=fitting)])
    assert import_folder(config, written(tmp_path / "b", fits)).joined == 1
    for name, ids in (("c", [facts.vocabulary]), ("d", [9] * facts.max_positions)):
        wrong = replace(one, steps=[replace(one.steps[0], prompt_token_ids=[*fitting, *ids])])
        with pytest.raises(ExchangeError, match="column prompt_token_ids"):
            import_folder(config, written(tmp_path / name, wrong))
    for name, ids in (("g", [9, 1]), ("h", [9, 4]), ("i", [9, facts.image_token])):
        wrong = replace(fits, steps=[copy_with(fits.steps[0], token_ids=ids)])
        with pytest.raises(ExchangeError, match=r"column token_ids: .* no policy samples"):
            import_folder(config, written(tmp_path / name, wrong))
    pointer = {"token_ids": [9, 5, 6, 7], "patches": [-1, -1, -1, 1], "entropies": []}
    pointer["behaviour_logprobs"] = [-0.5, -0.5, 0.0, -0.5]
    wrong = replace(fits, steps=[copy_with(fits.steps[0], **pointer)])
    with pytest.raises(ExchangeError, match=r"column patches: .* of a policy with"):
        import_folder(config, written(tmp_path / "k", wrong))
    apart = one_screen((56, 28))
    prompt = [facts.image_token, 9, facts.image_token]
    apart = replace(apart, steps=[replace(apart.steps[0], prompt_token_ids=prompt)])
    with pytest.raises(ExchangeError, match=r"column prompt_token_ids: .* not adjacent"):
        import_folder(config, written(tmp_path / "j", apart))
    with pytest.raises(ExchangeError, match=r"row 0, column screenshot: .* too long a strip"):
        import_folder(config, written(tmp_path / "f", one_screen((2100, 7))))
    with write_folder(tmp_path / "e", {"vocabulary": "of another"}) as shards:
        shards.add(fits)
    with pytest.raises(ExchangeError, match="another model"):
        import_folder(config, tmp_path / "e")
