"""Text: parsing, tokenising once, padding per batch, the classifier."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import IID, SST5, AGNews, FedGKD, LocalEngine, TextClassifier
from fedgkd_pl.data.datasets.text import sentence_of
from fedgkd_pl.data.examples import TrimPadding
from fedgkd_pl.errors import SettingError

from tests.conftest import fit
from tests.support.datasets import TINY, WORDS, write_ag_news, write_sst5


@pytest.fixture
def vocab(tmp_path: Path) -> str:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(WORDS) + "\n")
    return str(file)


def test_trees() -> None:
    for tree, sentence in (
        ("(3 (2 Good) (2 film))", "Good film"),
        ("(0 (1 (2 -LRB-) (2 bad)) (2 -RRB-))", "( bad )"),
        ("(4 (2 ``) (3 (2 Wow) (2 '')))", '" Wow "'),
    ):
        assert sentence_of(tree) == sentence


def test_sst5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: str) -> None:
    write_sst5(tmp_path / "sst", monkeypatch)
    data = SST5(data_dir=str(tmp_path / "sst"), tokenizer=vocab, num_clients=4, partition=IID())
    data.setup()
    assert sum(data.client_data.index.sizes) == 40  # all of them: validation is the treebank's own
    assert (len(data.val), len(data.test)) == (8, 10)
    ids = data.client_data.examples.inputs
    assert ids[0].tolist() == [2, 5, 6, 8, 3, 0]  # [CLS] a good film [SEP]
    assert ids[1].tolist() == [2, 5, 6, 8, 10, 3]  # film ##s
    assert data.client_data.examples.targets[:7].tolist() == [0, 1, 2, 3, 4, 0, 1]
    settings: dict[str, Any] = {"tokenizer": vocab, "num_clients": 2}
    assert SST5(str(tmp_path / "sst"), max_length=4, **settings).load().test.inputs.shape[1] == 4
    (tmp_path / "sst" / "dev.txt").write_text("(3 (2 a) (2 film))\n")
    with pytest.raises(SettingError, match=r"data_dir: .*dev\.txt is damaged or not the original"):
        SST5(str(tmp_path / "sst"), **settings).load()


def test_ag_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: str) -> None:
    write_ag_news(tmp_path / "ag", monkeypatch)
    settings: dict[str, Any] = {"data_dir": str(tmp_path / "ag"), "tokenizer": vocab}
    data = AGNews(**settings, train_samples=30, val_samples=10, num_clients=3)
    texts = data.texts()
    assert [len(texts[split][0]) for split in ("train", "val", "test")] == [30, 10, 12]
    seen = {text.split(",")[1] for text in texts["train"][0] + texts["val"][0]}
    assert len(seen) == 40, "a row is in both"
    assert texts["test"][0][0] == 'The news a "good" film is very bad, 0'
    assert texts["test"][0][1] == 'a "good" film is very bad, 1'  # no title: the text alone
    assert texts["test"][1][:5] == [0, 1, 2, 3, 0]
    with pytest.raises(SettingError, match="train_samples"):
        AGNews(**settings, train_samples=55, val_samples=10, num_clients=3).setup()


def test_batches_are_as_long_as_their_longest_text() -> None:
    ids = torch.tensor([[2, 5, 3, 0, 0], [2, 5, 6, 3, 0]], dtype=torch.int32)
    out = TrimPadding(0)(ids, None)
    assert out.tolist() == [[2, 5, 3, 0], [2, 5, 6, 3]] and out.dtype == torch.int64


def test_padding_does_not_change_the_logits() -> None:
    torch.manual_seed(0)
    net = TextClassifier(4, encoder_config=TINY).eval()
    ids = torch.tensor([[2, 5, 6, 3]])
    longer = torch.tensor([[2, 5, 6, 3, 0, 0, 0]])
    torch.testing.assert_close(net(ids), net(longer))
    assert not torch.allclose(net(ids), net(torch.tensor([[2, 5, 7, 3]])))
    torch.testing.assert_close(net.classifier(net.features(ids)), net(ids))


def test_a_tokenizer_with_more_words_than_the_net_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: str
) -> None:
    write_sst5(tmp_path / "sst", monkeypatch)
    data = SST5(data_dir=str(tmp_path / "sst"), tokenizer=vocab, num_clients=2)
    net = TextClassifier(5, encoder_config=TINY | {"vocab_size": 9})
    with pytest.raises(SettingError, match="gives token 10, the net knows 9"):
        fit(FedGKD(net, engine=LocalEngine(1)), data, 1)


def test_a_pretrained_encoder_trains_with_dropout(tmp_path: Path) -> None:
    """transformers gives pretrained nets in eval mode; clients must not train so."""
    from fedgkd_pl import FedAvg, TextClassifier
    from transformers import DistilBertConfig, DistilBertModel

    config = DistilBertConfig(vocab_size=50, dim=8, n_layers=2, n_heads=2, hidden_dim=16)
    DistilBertModel(config).save_pretrained(tmp_path)
    net = TextClassifier(2, encoder=str(tmp_path))
    drops = [m for m in FedAvg(net).client().net.modules() if isinstance(m, torch.nn.Dropout)]
    assert len(drops) > 4 and all(drop.training for drop in drops)
    ids = torch.randint(1, 50, (4, 6), generator=torch.Generator().manual_seed(0))
    first, second = net(ids), net(ids)
    assert not torch.equal(first, second), "dropout draws anew in every pass"
    assert torch.equal(net.eval()(ids), net(ids))
