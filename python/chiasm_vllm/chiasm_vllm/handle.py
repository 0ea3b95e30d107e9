"""The handle that a request carries in place of a tensor's bytes: ``[dtype, shape, handle]``."""

import math
from reprlib import repr as shortened
from typing import NamedTuple

import torch

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    )
}
"""The dtypes of tensors with handles, by torch's names."""

MAX_DIMENSIONS = 64
"""The maximum number of dimensions that the iterators of numpy and torch support."""


class HandleRefused(ValueError):
    """A handle that cannot be resolved.

    ``cause`` is one of a few fixed texts, so that each cause can be logged once. The message also
    contains ``values`` with their names.
    """

    def __init__(self, cause: str, **values: object) -> None:
        # Values come from a request: they can have any type and any size.
        named = ", ".join(f"{name} {shortened(value)}" for name, value in values.items())
        super().__init__(f"{cause} ({named})" if named else cause)
        self.cause = cause


class Handle(NamedTuple):
    """A lease of an arena, and the slot it is for, as an offset and a length in bytes."""

    arena: str
    lease: int
    generation: int
    offset: int
    length: int

    @classmethod
    def parse(cls, fields: dict) -> "Handle":
        """Parses a handle.

        Raises HandleRefused unless all fields exist, with the types and ranges of
        docs/shared-memory.md.
        """
        if not _is_unsigned(fields.get("chiasm"), 32) or fields["chiasm"] != 1:
            raise HandleRefused("a handle of another version than 1", chiasm=fields.get("chiasm"))
        if type(fields.get("arena")) is not str:
            raise HandleRefused("a handle without an arena", arena=fields.get("arena"))
        for name, bits in (("lease", 32), ("generation", 32), ("offset", 64), ("length", 64)):
            if not _is_unsigned(fields.get(name), bits):
                raise HandleRefused(
                    f"a handle whose {name} is not a u{bits}", **{name: fields.get(name)}
                )
        return cls(
            fields["arena"],
            fields["lease"],
            fields["generation"],
            fields["offset"],
            fields["length"],
        )


class TensorType(NamedTuple):
    """The element type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, dtype: object, shape: object) -> "TensorType":
        """Parses a tensor's type.

        Raises HandleRefused if the dtype is not in ``DTYPES`` or the shape is not a list of sizes.
        """
        torch_dtype = DTYPES.get(dtype) if type(dtype) is str else None
        if torch_dtype is None:
            raise HandleRefused("a dtype that handles can't have", dtype=dtype)
        # Each dimension has its own bound: a bound on the product would allow any size beside a
        # dimension of 0.
        if (
            not isinstance(shape, (list, tuple))
            or len(shape) > MAX_DIMENSIONS
            or not all(_is_unsigned(size, 63) for size in shape)
        ):
            raise HandleRefused("a shape that is not a list of sizes", shape=shape)
        return cls(torch_dtype, tuple(shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _is_unsigned(value: object, bits: int) -> bool:
    # Not isinstance: True is an int.
    return type(value) is int and 0 <= value < 1 << bits
