"""A classifier on any Hugging Face encoder."""

from typing import Any

from fedgkd_pl.errors import SettingError, installs, require
from fedgkd_pl.models.heads import Classifier, projection_of
from torch import Tensor, nn


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
    """

    def __init__(
        self,
        num_classes: int,
        encoder: str = "distilbert-base-uncased",
        encoder_config: dict[str, Any] | None = None,
        dropout: float = 0.2,
        projection: int | None = None,
    ) -> None:
        super().__init__()
        self.encoder = _encoder(encoder, encoder_config)
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
