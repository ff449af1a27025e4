"""Adapters of TextClassifier: what trains, what travels, and the plain net that they become."""

from math import prod
from typing import Any

import pytest
import torch
from fedgkd_pl import Exchange, FedAvg, LoRA, TextClassifier
from fedgkd_pl.callbacks.export import exported
from fedgkd_pl.errors import SettingError
from safetensors.torch import load
from torch import nn

TINY: dict[str, Any] = {
    **{"model_type": "distilbert", "n_layers": 2, "dim": 8, "hidden_dim": 16, "n_heads": 2},
    **{"vocab_size": 50, "max_position_embeddings": 16},
}
IDS = torch.randint(1, 50, (3, 7), generator=torch.Generator().manual_seed(0))


def net(**lora: Any) -> TextClassifier:
    torch.manual_seed(0)
    pytest.importorskip("peft")
    return TextClassifier(5, encoder_config=TINY, lora=LoRA(**lora) if lora else None)


def trained(model: nn.Module) -> dict[str, int]:
    return {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}


def test_adapters_change_nothing_at_first_and_only_they_and_the_head_train() -> None:
    plain, low = net(), net(r=2)
    weights = plain.state_dict()
    same = {n: weights.get(n.replace(".base_layer", ""), t) for n, t in low.state_dict().items()}
    low.load_state_dict(same)
    with torch.no_grad():
        torch.testing.assert_close(low.eval()(IDS), plain.eval()(IDS), atol=1e-6, rtol=0)
    names = trained(low)
    assert all("lora_" in n or n.startswith(("pre_classifier", "classifier")) for n in names)
    adapters = sum(number for name, number in names.items() if "lora_" in name)
    assert adapters == 2 * 2 * (2 * 8 + 8 * 2)  # layers · (q, v) · (r × 8 and 8 × r)


def test_with_a_frozen_only_b_travels() -> None:
    model = FedAvg(net(r=2, freeze_a=True), exchange=Exchange(share="trainable"))
    assert model.split is not None
    adapters = [name for name in model.split.shared if "lora_" in name]
    assert adapters and all("lora_B" in name for name in adapters)
    head = 8 * 8 + 8 + 5 * 8 + 5
    sent = sum(prod(spec.shape) for spec in model.client_model().values())
    assert sent == head + 2 * 2 * 8 * 2


def test_an_export_is_a_plain_model_with_the_same_logits() -> None:
    low = net(r=2)
    for name, weight in low.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    plain = net()
    plain.load_state_dict(load(exported(low, IDS, "safetensors")))
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(IDS), low.eval()(IDS), atol=1e-5, rtol=0)
    assert any("lora_" in name for name in low.state_dict()), "the net itself keeps its adapters"


def test_targets_that_no_layer_has() -> None:
    with pytest.raises(SettingError, match=r"lora\.targets: must name layers of the encoder"):
        net(r=2, targets=["nowhere"])
