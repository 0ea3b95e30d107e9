"""The fields of an item: tensors are written to memory, other values become JSON."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

# The alignment of tensors in the memory.
ALIGNMENT_BYTES = 64


class NoRoom(Exception):
    """The tensors do not fit into the memory."""


def write(item: MultiModalKwargsItem, memory: int, begin: int) -> Iterator[dict[str, Any]]:
    """Yields the name of each field, how it is joined with those of other items, and its data.

    Writes tensors to the open file ``memory``, starting at the offset ``begin``.
    """
    writer = _Writer(memory, begin)
    for name, element in item.items():
        yield {"name": name, **_describe_field(element.field), "data": writer.write(element.data)}


def _describe_field(field: BaseMultiModalField) -> dict[str, Any]:
    match field:
        case MultiModalBatchedField():
            description: dict[str, Any] = {"kind": "batched"}
        case MultiModalFlatField():
            # The tensor belongs to a single item here, so the item's slices cover all of it.
            slices = [_plain_slice(part) for part in field.slices]
            description = {"kind": "flat", "dim": field.dim, "slices": slices}
        case MultiModalSharedField():
            description = {"kind": "shared"}
        case _:
            raise TypeError(f"no form for {type(field).__name__}")
    return {**description, "keep_on_cpu": field.keep_on_cpu}


def _plain_slice(part: slice | tuple[slice, ...]) -> list[Any]:
    if isinstance(part, slice):
        # Some bounds are tensors.
        bounds = (part.start, part.stop, part.step)
        return [None if bound is None else int(bound) for bound in bounds]
    return [_plain_slice(inner) for inner in part]


class _Writer:
    """The data of fields. Tensors are appended to the memory."""

    def __init__(self, memory: int, begin: int) -> None:
        self._memory = memory
        self._capacity = os.fstat(memory).st_size
        self._end = begin

    def write(self, data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return self._write_tensor(data)
        if isinstance(data, list | tuple):
            return [self.write(part) for part in data]
        if isinstance(data, np.generic):
            return data.item()
        if data is None or isinstance(data, bool | int | float | str):
            return data
        raise TypeError(f"no form for {type(data).__name__}")

    def _write_tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        tensor = tensor.detach().cpu().contiguous()
        length = tensor.numel() * tensor.element_size()
        offset = -(-self._end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._end = offset + length
        if self._end > self._capacity:
            raise NoRoom(f"the item's tensors take more than {self._capacity} bytes")
        # Faster than writing to a mapping, whose pages the kernel would clear first.
        content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        while content:
            content = content[os.pwrite(self._memory, content, self._end - len(content)) :]
        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "offset": offset,
            "length": length,
        }
