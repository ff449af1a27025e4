"""What `--import my_project` brings in, for configs to name."""

from my_project.data import MyData
from my_project.method import MyMethod
from my_project.net import MyNet

__all__ = ["MyData", "MyMethod", "MyNet"]
