"""The files of the datasets, small and made here, and a small encoder."""

import io
import pickle
from hashlib import md5, sha256
from pathlib import Path

import numpy as np
import pytest
from fedgkd_pl import SST5, AGNews, TinyImageNet
from PIL import Image


def write_cifar(folder: Path, monkeypatch: pytest.MonkeyPatch, classes: int = 10) -> None:
    """The layout of the real files, with a few images, and their checksums."""
    from torchvision import datasets

    Source = getattr(datasets, f"CIFAR{classes}")
    base = folder / Source.base_folder
    base.mkdir(parents=True)
    rng = np.random.default_rng(0)

    def write(name: str, content: object) -> tuple[str, str]:
        blob = pickle.dumps(content)
        (base / name).write_bytes(blob)
        return name, md5(blob).hexdigest()

    batches = [
        write(
            name,
            {
                "data": rng.integers(0, 256, (40, 3072), dtype=np.uint8),
                "labels" if classes == 10 else "fine_labels": rng.integers(0, classes, 40).tolist(),
            },
        )
        for name in [f"train_{number}" for number in range(1, 6)] + ["test"]
    ]
    monkeypatch.setattr(Source, "train_list", batches[:5])
    names = [f"class {number}" for number in range(classes)]
    _, checksum = write(Source.meta["filename"], {Source.meta["key"]: names})
    monkeypatch.setattr(Source, "meta", Source.meta | {"md5": checksum})
    monkeypatch.setattr(Source, "test_list", batches[5:])


WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a good bad film news ##s the of , . ( ) is very".split()
TINY = {
    "model_type": "distilbert",
    "vocab_size": len(WORDS),
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 64,
}


def write_sst5(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int = 40) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for split, name, count in (("train", "train", rows), ("val", "dev", 8), ("test", "test", 10)):
        trees = [
            f"({n % 5} (2 a) ({n % 5} (3 good) (2 film{'s' * (n % 2)})))" for n in range(count)
        ]
        (folder / f"{name}.txt").write_text("\n".join(trees) + "\n")
        sums[split] = sha256((folder / f"{name}.txt").read_bytes()).hexdigest()
    monkeypatch.setattr(SST5, "SHA256", sums)


def write_ag_news(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int = 60) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name, count in (("train.csv", rows), ("test.csv", 12)):
        lines = [
            f'"{n % 4 + 1}","{"" if n % 3 else "The news"}","a ""good"" film\\is very bad, {n}"'
            for n in range(count)
        ]
        (folder / name).write_text("\n".join(lines) + "\n")
        sums[name] = md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(AGNews, "MD5", sums)


def write_tiny(folder: Path, monkeypatch: pytest.MonkeyPatch, classes: int = 3) -> Path:
    monkeypatch.setattr(TinyImageNet, "num_classes", classes)
    monkeypatch.setattr(TinyImageNet, "PER_CLASS", 10)
    monkeypatch.setattr(TinyImageNet, "TEST", 6)
    root = folder / "tiny-imagenet-200"
    rng = np.random.default_rng(0)
    names = [f"n{number:02d}" for number in range(1, classes + 1)]

    def write(file: Path, level: int, grey: bool) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        shape = (64, 64) if grey else (64, 64, 3)
        pixels = np.clip(rng.normal(level, 3, shape), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(file, "JPEG", quality=95)

    for number, name in enumerate(names):
        for image in range(10):
            file = root / "train" / name / "images" / f"{name}_{image}.JPEG"
            write(file, 20 + 80 * (number % 3), grey=image == 0)
    lines = []
    for image in range(6):
        write(root / "val" / "images" / f"val_{image}.JPEG", 20 + 80 * (image % 3), grey=False)
        lines.append(f"val_{image}.JPEG\t{names[image % 3]}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (root / "wnids.txt").write_text("\n".join(names) + "\n")
    return root


def image(size: tuple[int, int] = (64, 64), form: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 50).save(out, form)
    return out.getvalue()
