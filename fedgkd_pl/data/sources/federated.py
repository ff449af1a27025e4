"""Own data in one line each."""

from fedgkd_pl.data.sources.arrays import Arrays
from fedgkd_pl.data.sources.clients import ClientFiles
from fedgkd_pl.data.sources.datamodule import LightningData
from fedgkd_pl.data.sources.dataset import TorchDataset
from fedgkd_pl.data.sources.huggingface import HuggingFace
from fedgkd_pl.data.sources.images import ImageFolders
from fedgkd_pl.data.sources.leaf import Leaf
from fedgkd_pl.data.sources.tables import CSVTable, ParquetTable
from fedgkd_pl.data.sources.text import TextFiles


class FederatedData:
    """Own data in one line: ``FederatedData.from_csv("cars.csv", label="kind", num_clients=10)``.

    Each constructor makes an object of the class that a YAML file names.
    """

    from_arrays = Arrays
    from_dataset = TorchDataset
    from_image_folder = ImageFolders
    from_csv = CSVTable
    from_parquet = ParquetTable
    from_huggingface = HuggingFace
    from_text = TextFiles
    from_clients = ClientFiles
    from_leaf = Leaf
    from_datamodule = LightningData
