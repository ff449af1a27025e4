"""The data, before it is cut into clients. Edit me."""

from typing import Any

import numpy as np
from fedgkd_pl import Arrays
from sklearn.datasets import load_digits


class MyData(Arrays):
    """Handwritten digits: 1,797 images of 8 × 8 pixels that come with scikit-learn.

    A fifth of each class is the test set, a tenth of the rest the validation set. How the others
    are cut into clients is said in config.yaml: `num_clients`, `partition`, `participation`.
    """

    name = "my-data"  # in tables and file names

    def __init__(self, **kwargs: Any) -> None:
        # Your own arrays go here, a row for every sample and its class number, from 0:
        # x, y = np.load("x.npy"), np.load("y.npy")
        x, y = load_digits(return_X_y=True)
        x = np.float32(x / 16)  # numbers around 1 are best for the net
        super().__init__(x, y, **kwargs)


# Files need no class of your own. config.yaml may name one of these instead of MyData:
#   data: {class_path: CSVTable, init_args: {path: cars.csv, label: kind, num_clients: 10}}
#   data: {class_path: ImageFolders, init_args: {path: photos, size: 32, num_clients: 10}}
# More (Parquet, Hugging Face, texts, a torch Dataset, a file for every client): docs/data.md of
# fedgkd_pl. The `inputs` and `classes` of MyNet must fit.
