"""Folders as the release of GUI-Actor saves them: its names, its shapes, its config.json.

Written from its published code (microsoft/GUI-Actor, modeling.py, modeling_qwen25vl.py, train.py), at the
smallest size: transformers 4.51 named tensors `visual....`, `model....`, `lm_head.weight`; five tokens are
added behind the tokenizer's, and the embeddings are cut to as many rows as there are tokens.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import nn

from dart_cli.config.model_folder import check_folder, model_problem
from dart_cli.policy.loader import load_policy
from dart_cli.policy.model_files import PolicyFiles
from scripts.small_models import HIDDEN

ADDED = (
    *("<|recipient|>", "<|diff_marker|>"),
    *("<|pointer_start|>", "<|pointer_end|>", "<|pointer_pad|>"),
)
"""In the release's order: end before pad."""
CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGenerationWithPointer",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGenerationWithPointer",
}


class ReleasedHead(nn.Module):
    """The layers of the release's head, by its names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection_enc = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )
        self.projection_dec = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )
        self.self_attention = nn.MultiheadAttention(width, 8, dropout=0.1, batch_first=True)
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, visual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Probabilities [N, P]."""
        seen, _ = self.self_attention(visual[None], visual[None], visual[None], need_weights=False)
        keys = self.projection_enc(self.layer_norm(visual + seen[0]))
        queries = self.projection_dec(hidden)
        return (queries @ keys.T / visual.shape[1] ** 0.5).softmax(-1)


def older_name(name: str) -> str:
    """A tensor's name before transformers 4.52."""
    name = re.sub(r"^model\.visual\.", "visual.", name)
    return re.sub(r"^model\.language_model\.", "model.", name)


def released(base: Path, model_type: str, folder: Path) -> ReleasedHead:
    """Write `base`, of that type, as the release would have saved it; its head."""
    shutil.copytree(base, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in ADDED}
    rows = tokenizer.get_vocab_size()
    settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "eos_token": "<|diff_marker|>"})
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": [CLASSES[model_type]],
        "eos_token_id": [ids["<|diff_marker|>"]],
        "pointer_start_token_id": ids["<|pointer_start|>"],
        "pointer_end_token_id": ids["<|pointer_end|>"],
        "pointer_pad_token_id": ids["<|pointer_pad|>"],
        "transformers_version": "4.51.3",
        "use_cache": True,
        "vocab_size": rows,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(11)
    head = ReleasedHead(HIDDEN).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    tensors = {
        older_name(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:rows].clone()
    tensors |= {f"multi_patch_pointer_head.{name}": t for name, t in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return head


@pytest.mark.parametrize("model_type", list(CLASSES))
def test_a_folder_of_the_release_loads_and_points_as_its_own_layers_do(
    model_type: str, tmp_path: Path, family: Callable[[str], Path]
) -> None:
    head = released(family(model_type), model_type, tmp_path / "released")
    assert model_problem(str(tmp_path / "released")) == ""
    config = check_folder(tmp_path / "released")
    policy = load_policy(tmp_path / "released", pointing="pointer")
    assert policy.pointer is not None
    assert policy.pointer.triple == (
        config["pointer_start_token_id"],
        config["pointer_pad_token_id"],
        config["pointer_end_token_id"],
    )
    assert policy.pointer.pad == policy.pointer.end + 1  # as the release numbers them
    assert config["eos_token_id"][0] in policy.end_token_ids
    plain = load_policy(family(model_type)).model
    mine = dict(policy.model.named_parameters())
    for name, tensor in plain.named_parameters():
        assert torch.equal(mine[name], tensor[: len(mine[name])])
    pointer_head = policy.pointer_head
    assert pointer_head is not None
    visual, hidden = torch.randn(12, HIDDEN), torch.randn(2, HIDDEN)
    with torch.inference_mode():
        expected, found = head(visual, hidden), pointer_head(visual, hidden).softmax(-1)
    assert expected.max() > 0.3
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    with PolicyFiles(tmp_path / "released") as files:  # as ranks read it, in shards
        for name, parameter in policy.model.named_parameters():
            assert torch.equal(files.whole(name), parameter)
