"""Tensors as bytes."""

from collections.abc import Mapping

from torch import Tensor


def to_safetensors(state: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Tensors of any device as one safetensors blob; tied weights are written once per name."""
    from safetensors.torch import save

    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return bytes(save(plain, metadata))
