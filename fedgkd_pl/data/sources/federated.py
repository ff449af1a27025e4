"""Own data in one line each."""

from fedgkd_pl.data.sources.base import Arrays
from fedgkd_pl.data.sources.dataset import LightningData, TorchDataset
from fedgkd_pl.data.sources.folders import ClientFiles, ImageFolders, Leaf
from fedgkd_pl.data.sources.tables import CSVTable, HuggingFace, ParquetTable, TextFiles


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
