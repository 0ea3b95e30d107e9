"""What a request says instead of a tensor's bytes: ``[dtype, shape, handle]``."""

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
"""The dtypes that a handle may name, by torch's names."""

MAX_DIMENSIONS = 64
"""As many as numpy and torch's iterators take."""


class HandleRefused(ValueError):
    """A handle that can't be resolved.

    ``cause`` is one of a few fixed texts, so that each can be logged once. The message adds ``values`` by name.
    """

    def __init__(self, cause: str, **values: object) -> None:
        # They come from a request: of any type, of any size.
        named = ", ".join(f"{name} {shortened(value)}" for name, value in values.items())
        super().__init__(f"{cause} ({named})" if named else cause)
        self.cause = cause


class Handle(NamedTuple):
    """Which lease of which arena, and the slot that it is for, in bytes of the file."""

    arena: str
    lease: int
    generation: int
    offset: int
    length: int

    @classmethod
    def parse(cls, fields: dict) -> "Handle":
        """Raises HandleRefused unless all fields are there, with the types and ranges of the contract."""
        if not _is_unsigned(fields.get("chiasm"), 32) or fields["chiasm"] != 1:
            raise HandleRefused("a handle of another version than 1", chiasm=fields.get("chiasm"))
        if type(fields.get("arena")) is not str:
            raise HandleRefused("a handle without an arena", arena=fields.get("arena"))
        for name, bits in (("lease", 32), ("generation", 32), ("offset", 64), ("length", 64)):
            if not _is_unsigned(fields.get(name), bits):
                raise HandleRefused(f"a handle whose {name} is no u{bits}", **{name: fields.get(name)})
        return cls(fields["arena"], fields["lease"], fields["generation"], fields["offset"], fields["length"])


class TensorType(NamedTuple):
    """Element type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, dtype: object, shape: object) -> "TensorType":
        """Raises HandleRefused for a dtype that is not in ``DTYPES`` and for what is no shape."""
        known = DTYPES.get(dtype) if type(dtype) is str else None
        if known is None:
            raise HandleRefused("a dtype that handles can't have", dtype=dtype)
        # Each dimension is bounded by itself: beside a 0 the product says nothing about the others.
        if (
            not isinstance(shape, (list, tuple))
            or len(shape) > MAX_DIMENSIONS
            or not all(_is_unsigned(size, 63) for size in shape)
        ):
            raise HandleRefused("a shape that is no list of sizes", shape=shape)
        return cls(known, tuple(shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _is_unsigned(value: object, bits: int) -> bool:
    # Not isinstance: True is an int.
    return type(value) is int and 0 <= value < 1 << bits
