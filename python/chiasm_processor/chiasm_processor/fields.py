"""An item's fields: tensors written into memory, the rest as JSON."""

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

# Where tensors begin, as memory of all kinds likes it.
ALIGNMENT = 64


class NoRoom(Exception):
    """The tensors do not fit into the memory."""


def write(item: MultiModalKwargsItem, memory: int, begin: int) -> Iterator[dict[str, Any]]:
    """Each field with its name, how it is joined with those of other items, and its data; tensors lie in ``memory``, which is an open
    file, behind ``begin``."""
    writer = _Writer(memory, begin)
    for name, element in item.items():
        yield {"name": name, **_joined(element.field), "data": writer.write(element.data)}


def _joined(field: BaseMultiModalField) -> dict[str, Any]:
    match field:
        case MultiModalBatchedField():
            how: dict[str, Any] = {"kind": "batched"}
        case MultiModalFlatField():
            # One item's part of the tensor is all of it here.
            how = {"kind": "flat", "dim": field.dim, "slices": [_plain_slice(part) for part in field.slices]}
        case MultiModalSharedField():
            how = {"kind": "shared"}
        case _:
            raise TypeError(f"no form for {type(field).__name__}")
    return {**how, "keep_on_cpu": field.keep_on_cpu}


def _plain_slice(part: slice | tuple[slice, ...]) -> list[Any]:
    if isinstance(part, slice):
        # Some are tensors.
        return [None if bound is None else int(bound) for bound in (part.start, part.stop, part.step)]
    return [_plain_slice(inner) for inner in part]


class _Writer:
    def __init__(self, memory: int, begin: int) -> None:
        self._memory = memory
        self._room = os.fstat(memory).st_size
        self._end = begin

    def write(self, data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return self._tensor(data)
        if isinstance(data, list | tuple):
            return [self.write(part) for part in data]
        if isinstance(data, np.generic):
            return data.item()
        if data is None or isinstance(data, bool | int | float | str):
            return data
        raise TypeError(f"no form for {type(data).__name__}")

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        tensor = tensor.detach().cpu().contiguous()
        length = tensor.numel() * tensor.element_size()
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._end = offset + length
        if self._end > self._room:
            raise NoRoom(f"the item's tensors take more than {self._room} bytes")
        # Writing is quicker than a mapping, whose pages would be cleared first.
        content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        while content:
            content = content[os.pwrite(self._memory, content, self._end - len(content)) :]
        return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "offset": offset, "length": length}
