"""The messages between frontend, fork server and children.

A message is a length of four bytes, little-endian, followed by that many bytes of JSON. Large data
lies in memory shared by both sides, not in messages. Lists with repeated values, as in
placeholders, are encoded as runs: ``[[value, count], …]``.
"""

from itertools import groupby
from typing import Any, Literal, TypeVar

import msgspec

_T = TypeVar("_T", int, bool)

Runs = list[tuple[_T, int]]


class PromptUpdate(msgspec.Struct, omit_defaults=True):
    """One way to write an item in a prompt: the tokens that replace or follow a target."""

    mode: Literal["insert", "replace"]
    # Token ids, a position, or {"prefix": token ids} for the position after these tokens.
    target: list[int] | Literal["start", "end"] | dict[str, list[int]]
    # The item's tokens.
    full: list[tuple[int, int]]
    # The tokens that become embeddings; None for all.
    is_embed: list[tuple[bool, int]] | None = None


class ItemCall(msgspec.Struct, tag="item", tag_field="call"):
    """Makes the tensors of an item.

    The item's file is at the beginning of the memory. The tensors are written after it.
    """

    modality: str
    length: int
    processor_kwargs: dict[str, Any] = {}
    # By modality.
    io_kwargs: dict[str, dict[str, Any]] = {}


class KnownItem(msgspec.Struct):
    """An item of a prompt, as described by the reply when it was made."""

    modality: str
    updates: list[PromptUpdate]


class PromptCall(msgspec.Struct, tag="prompt", tag_field="call"):
    """Expands a prompt with these items, those of each modality in their order."""

    token_ids: list[int]
    items: list[KnownItem]
    processor_kwargs: dict[str, Any] = {}


class ChatCall(msgspec.Struct, tag="chat", tag_field="call"):
    """Renders a conversation with these items, and expands it.

    A part of the item's modality marks its position. The part has no URL, and its ``uuid`` is the
    item's number among ``items``.
    """

    messages: list[dict[str, Any]]
    items: list[KnownItem]
    # Further fields of the request that change the prompt.
    settings: dict[str, Any] = {}
    processor_kwargs: dict[str, Any] = {}


class FramesCall(msgspec.Struct, tag="frames", tag_field="call"):
    """Decodes wanted frames of a small video file.

    The file is at the beginning of the memory. Behind it are ``slots`` slots of one frame each.
    """

    length: int
    # The number of frames of the file.
    samples: int
    # The positions of the wanted frames, ascending.
    positions: list[int]
    # The size of the decoded frames.
    width: int
    height: int
    slots: int


class FrameTaken(msgspec.Struct, tag="taken", tag_field="call"):
    """The frontend has read a frame, so its slot is free. It has no reply.

    It is only sent if there is a frame left for the slot.
    """


class MadeItem(msgspec.Struct, tag="made", tag_field="reply", omit_defaults=True):
    """The fields of an item (``fields.py``), and the ways to write it."""

    fields: list[dict[str, Any]]
    updates: list[PromptUpdate]


class Placeholder(msgspec.Struct, omit_defaults=True):
    """The position of an item in an expanded prompt."""

    offset: int
    length: int
    is_embed: list[tuple[bool, int]] | None = None


class ExpandedPrompt(msgspec.Struct, tag="expanded", tag_field="reply"):
    """An expanded prompt, and its placeholders in the order of the items."""

    token_ids: list[int]
    placeholders: list[Placeholder]


class Frame(msgspec.Struct, tag="frame", tag_field="reply"):
    """The next wanted frame is in the memory: rows of RGB."""

    position: int
    offset: int


class Decoded(msgspec.Struct, tag="decoded", tag_field="reply"):
    """The whole file was decoded, and all wanted frames were sent."""


class DifferentFrames(msgspec.Struct, tag="different", tag_field="reply"):
    """The file decodes to other frames than the call says."""

    reason: str


class Refusal(msgspec.Struct, tag="refused", tag_field="reply"):
    """The item, the prompt or the video is invalid, for a reason in vLLM's words."""

    reason: str


Call = ItemCall | PromptCall | ChatCall | FramesCall
Reply = MadeItem | ExpandedPrompt | Decoded | DifferentFrames | Refusal

_decoder = msgspec.json.Decoder(Call)
_taken_decoder = msgspec.json.Decoder(FrameTaken)
_encoder = msgspec.json.Encoder()


def decode(message: bytes) -> Call:
    return _decoder.decode(message)


def decode_taken(message: bytes) -> FrameTaken:
    return _taken_decoder.decode(message)


def encode(reply: Reply | Frame) -> bytes:
    return _encoder.encode(reply)


def to_runs(values: list[_T]) -> list[tuple[_T, int]]:
    return [(value, sum(1 for _ in same)) for value, same in groupby(values)]


def from_runs(runs: list[tuple[_T, int]]) -> list[_T]:
    return [value for value, count in runs for _ in range(count)]
