"""How a dataset's samples lie in files: what a data module says of its own, in ``reading``.

A run keeps it in ``model.json``, so that new inputs are read as the training data was.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pictures:
    """Images as bytes, channels first.

    Attributes:
        shape: channels, height and width; by default those of a stored sample.
        resize: whether images of other sizes are resized, as those of training were.
        largest: what the brightest pixel is stored as.
    """

    shape: tuple[int, int, int] | None = None
    resize: bool = False
    largest: int = 255


@dataclass(frozen=True)
class Cells:
    """Rows of a table, as float32 after (cell - mean) / deviation.

    Attributes:
        columns: those of the inputs, in their order.
        mean: one number for each column.
        deviation: one number for each column.
    """

    columns: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Words:
    """Texts as token ids, padded on the right.

    Attributes:
        column: that of the texts, in a table.
        tokenizer: its name, folder or ``vocab.txt``.
        max_length: longer texts are cut to this many tokens.
        vocabulary: the tokenizer's own file, as text; empty where it has none.
    """

    column: str
    tokenizer: str
    max_length: int
    vocabulary: str = field(default="", repr=False)


Reading = Pictures | Cells | Words
