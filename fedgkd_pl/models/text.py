"""A classifier on any Hugging Face encoder."""

from dataclasses import dataclass, field
from typing import Any

from fedgkd_pl.errors import SettingError, installs, require
from fedgkd_pl.models.heads import Classifier, projection_of
from torch import Tensor, nn


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters beside frozen layers: W x + alpha/r · B A x (Hu et al., ICLR 2022).

    With ``exchange: {share: trainable}`` they and the classifier are all that travels. The mean of
    clients' B A is not the product of the means of B and A; with ``freeze_a`` it is, as A is the
    same everywhere (FFA-LoRA, Sun et al., ICLR 2024).

    Attributes:
        r: their rank.
        alpha: their scale, which is divided by r.
        dropout: of what they see.
        targets: the names of the layers that have them, such as ``[q_lin, v_lin]``.
        freeze_a: train B alone.
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    targets: list[str] = field(default_factory=lambda: ["q_lin", "v_lin", "query", "value"])
    freeze_a: bool = False

    def add_to(self, encoder: nn.Module) -> None:
        """Freezes an encoder and adds the adapters; B is zero at first, so outputs stay."""
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise SettingError("lora", f"needs {installs('text')}") from error
        names = {name.rpartition(".")[2] for name, _ in encoder.named_modules()}
        targets = [name for name in self.targets if name in names]
        text = f"must name layers of the encoder, which has {', '.join(sorted(names)[-20:])}"
        require(len(targets) > 0, "lora.targets", text, self.targets)
        how: dict[str, Any] = {"lora_alpha": self.alpha, "lora_dropout": self.dropout}
        inject_adapter_in_model(LoraConfig(r=self.r, target_modules=targets, **how), encoder)
        for name, weight in encoder.named_parameters():
            weight.requires_grad_("lora_B" in name or ("lora_A" in name and not self.freeze_a))


def merged(net: nn.Module) -> nn.Module:
    """A net whose adapters are added to the layers that they stand beside; changes the net."""
    for name, module in list(net.named_modules()):
        if hasattr(module, "get_base_layer") and hasattr(module, "merge"):
            module.merge()
            owner, _, last = name.rpartition(".")
            setattr(net.get_submodule(owner), last, module.get_base_layer())
    return net


class TextClassifier(Classifier):
    """DistilBERT's classifier, on any encoder: first token, Linear, ReLU, dropout, Linear.

    Args:
        num_classes: number of classes.
        encoder: a Hugging Face name or a local folder with the pretrained weights.
        encoder_config: instead, the settings of an encoder with random weights, such as
            ``{model_type: distilbert, n_layers: 2, dim: 128}``; works offline.
        dropout: before the classifier.
        projection: width of a projection head before the classifier (MOON, FedGKD+: 256); None
            for none.
        lora: trains adapters beside the frozen encoder; None trains the encoder.
    """

    def __init__(
        self,
        num_classes: int,
        encoder: str = "distilbert-base-uncased",
        encoder_config: dict[str, Any] | None = None,
        dropout: float = 0.2,
        projection: int | None = None,
        lora: LoRA | None = None,
    ) -> None:
        super().__init__()
        self.encoder = _encoder(encoder, encoder_config)
        if lora is not None:
            lora.add_to(self.encoder)
        width = self.encoder.config.hidden_size
        self.vocab_size: int = self.encoder.config.vocab_size
        self.pad_id: int = self.encoder.config.pad_token_id or 0
        self.pre_classifier = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.projection, width = projection_of(width, projection)
        self.classifier = nn.Linear(width, num_classes)

    def features(self, ids: Tensor) -> Tensor:
        """The input of the classifier for token ids, batch × length, padded on the right."""
        mask = (ids != self.pad_id).long()
        first = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        return self.projection(self.dropout(self.pre_classifier(first).relu()))  # type: ignore[no-any-return]


def _encoder(name: str, config: dict[str, Any] | None) -> Any:
    transformers = load_transformers("net")
    key, got = ("encoder", name) if config is None else ("encoder_config", config)
    safe: dict[str, Any] = {"trust_remote_code": False}
    try:
        if config is None:
            settings = transformers.AutoConfig.from_pretrained(name, **safe)
        else:
            settings = transformers.AutoConfig.for_model(**config)
        attention = str(getattr(settings, "_attn_implementation", None))
        plain = attention.isidentifier()  # not a repository's name, whose kernels would be fetched
        require(plain, key, "would need code that is not here", got)
        if config is None:
            safe |= {"config": settings, "weights_only": True}
            encoder = transformers.AutoModel.from_pretrained(name, **safe)
        else:
            encoder = transformers.AutoModel.from_config(settings, **safe)
    except SettingError:
        raise
    except (OSError, TypeError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingError(key, reason, got) from error
    if hasattr(encoder, "pooler"):
        encoder.pooler = None  # BERT's; unused here, and would only travel to the clients and back
    return encoder.train()  # from_pretrained gives eval mode: no dropout, in training either


def load_transformers(key: str) -> Any:
    """The library, which is optional; without it an error names the setting that needs it."""
    try:
        import transformers
    except ImportError as error:
        raise SettingError(key, f"text needs {installs('text')}") from error
    return transformers
