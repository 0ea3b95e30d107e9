"""The families, one module per group of related ones.

Each `make_…` function returns a `TinyModel` whose weights are not set yet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import transformers


@dataclass
class TinyModel:
    """A small model with the architecture of a published one."""

    model: transformers.PreTrainedModel
    processor: transformers.ProcessorMixin
    # Converts the files that transformers saved to the published form, where vLLM requires that.
    publish: Callable[[Path], None] | None = None
    # The media that a prompt may contain: "image", "audio" and "video".
    media: tuple[str, ...] = ("image",)
