"""What frontend and helper tell each other: a length of four bytes, little-endian, then that many bytes of JSON.

Large things lie in the memory that both map, not in messages. Lists in which values repeat, as placeholders do, travel as runs:
``[[value, count], …]``.
"""

from itertools import groupby
from typing import Any, Literal, TypeVar

import msgspec

_T = TypeVar("_T", int, bool)

Runs = list[tuple[_T, int]]


class Update(msgspec.Struct, omit_defaults=True):
    """One way to write an item in a prompt: what stands at the target, or is put there, and which of it gets embeddings."""

    mode: Literal["insert", "replace"]
    # Token ids, a place, or {"prefix": token ids} for the place after these.
    target: list[int] | Literal["start", "end"] | dict[str, list[int]]
    full: list[tuple[int, int]]
    # For all of it if there is none.
    is_embed: list[tuple[bool, int]] | None = None


class Item(msgspec.Struct, tag="item", tag_field="call"):
    """Make one item's tensors of its file, which lies at the beginning of the memory; they are written behind it."""

    modality: str
    length: int
    processor_kwargs: dict[str, Any] = {}
    # Of each modality.
    io_kwargs: dict[str, dict[str, Any]] = {}


class KnownItem(msgspec.Struct):
    """An item of a prompt, by what was answered when it was made."""

    modality: str
    updates: list[Update]


class Prompt(msgspec.Struct, tag="prompt", tag_field="call"):
    """Expand a prompt that has these items, those of each modality in their order."""

    token_ids: list[int]
    items: list[KnownItem]
    processor_kwargs: dict[str, Any] = {}


class Chat(msgspec.Struct, tag="chat", tag_field="call"):
    """Write a conversation that has these items, and expand it. Where an item goes stands a part of its modality without a URL, whose
    ``uuid`` is the item's number among ``items``."""

    messages: list[dict[str, Any]]
    items: list[KnownItem]
    # Fields of a request beside its messages that change what is written.
    settings: dict[str, Any] = {}
    processor_kwargs: dict[str, Any] = {}


class Made(msgspec.Struct, tag="made", tag_field="reply", omit_defaults=True):
    """An item's fields (``fields.py``), and the ways to write it."""

    fields: list[dict[str, Any]]
    updates: list[Update]


class Placeholder(msgspec.Struct, omit_defaults=True):
    """Where an item stands in an expanded prompt."""

    offset: int
    length: int
    is_embed: list[tuple[bool, int]] | None = None


class Expanded(msgspec.Struct, tag="expanded", tag_field="reply"):
    """An expanded prompt, and its placeholders in the order of the items."""

    token_ids: list[int]
    placeholders: list[Placeholder]


class Refused(msgspec.Struct, tag="refused", tag_field="reply"):
    """The item or the prompt is no valid one, in vLLM's words."""

    reason: str


Call = Item | Prompt | Chat
Reply = Made | Expanded | Refused

_decoder = msgspec.json.Decoder(Call)
_encoder = msgspec.json.Encoder()


def decode(message: bytes) -> Call:
    return _decoder.decode(message)


def encode(reply: Reply) -> bytes:
    return _encoder.encode(reply)


def runs(values: list[_T]) -> list[tuple[_T, int]]:
    return [(value, sum(1 for _ in same)) for value, same in groupby(values)]


def unrolled(runs: list[tuple[_T, int]]) -> list[_T]:
    return [value for value, count in runs for _ in range(count)]
