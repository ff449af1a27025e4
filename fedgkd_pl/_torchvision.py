"""Makes torchvision importable beside a CPU-only torch.

The torchvision of the package index is a CUDA build. Beside a CPU build of torch its C++ operators
do not load, and ``import torchvision`` (and with it torchmetrics and lightning) stops at *operator
torchvision::nms does not exist*: two operators are looked up by name while torchvision is imported.
Declaring the two names is enough for its datasets, transforms and models.

It is done when torchvision is first imported, by a finder that looks and steps aside, so that
importing fedgkd_pl alone does not cost an import of torch.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[Any] = []  # a torch.library.Library takes its operators back when it is collected


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and spec.origin is not None:
                declare_missing_operators(Path(spec.origin).parent)
        return None


def install() -> None:
    """Prepares the first import of torchvision; does nothing if it is imported already."""
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def declare_missing_operators(package: Path) -> bool:
    """Declares torchvision's operators if those in its folder do not load; whether it did."""
    import torch

    try:
        for library in sorted(package.glob("_C*.[ps]*")):
            torch.ops.load_library(library)
            return False
    except OSError:
        library_ = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library_.define(schema)
        _declared.append(library_)
        return True
    return False
