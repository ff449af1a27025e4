"""What `--import my_project` brings in; a config names it as my_project.MyNet and so on."""

from my_project.data import MyData
from my_project.method import MyMethod
from my_project.net import MyNet

__all__ = ["MyData", "MyMethod", "MyNet"]
