"""One file for each group of related families. Each `make_…` gives a `TinyModel` without set weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import transformers


@dataclass
class TinyModel:
    model: transformers.PreTrainedModel
    processor: transformers.ProcessorMixin
    # Turns what transformers saved into what is published, where these differ and vLLM wants the latter.
    publish: Callable[[Path], None] | None = None
    # Of "image", "audio" and "video", what a prompt may hold.
    media: tuple[str, ...] = ("image",)
