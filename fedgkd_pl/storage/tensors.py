"""Tensors as bytes."""

from collections.abc import Mapping

from torch import Tensor


def to_safetensors(state: Mapping[str, Tensor]) -> bytes:
    """Tensors as one safetensors blob; tied weights are written under each of their names.

    Args:
        state: tensors by name, on any device.
    """
    from safetensors.torch import save

    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return bytes(save(plain))
