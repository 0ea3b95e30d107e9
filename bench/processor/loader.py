"""vLLM's own loader and processor of videos, as the code of `python/chiasm_processor` calls them:
`loader.py MODEL`.

One process with the threads that vLLM's frontend takes, from a file in memory to tensors in memory:
no HTTP, no prompt, no copies. Results are digests of the pixels.
"""

import sys
from pathlib import Path
from typing import Any

import blake3
import torch

sys.path.append(str(Path(__file__).parents[2] / "python/chiasm_processor"))
from chiasm_processor.greeting import build_greeting  # noqa: E402
from chiasm_processor.processor import Processor  # noqa: E402

from long_videos import loader_settings  # noqa: E402
from turns import serve  # noqa: E402

# From the folder that `turns` has added to the path.
from parent import run  # noqa: E402  # isort: skip


def digest(processed: Any) -> int:
    """Returns the digest of the pixels that a simulated engine reports."""
    item, _ = processed
    pixels = item["pixel_values_videos"].data
    array = pixels.contiguous().view(-1).view(torch.uint8).numpy()
    return int(blake3.blake3(array.tobytes()).hexdigest()[:8], 16)


def main(model: str) -> None:
    processor = Processor(["--model", model])
    build_greeting(processor)
    serve(
        # The kind of an order is the file's path, and its question is the number of frames.
        lambda path, _, frames: (Path(path).read_bytes(), loader_settings(frames)),
        lambda prepared: processor.make_item("video", prepared[0], {}, prepared[1]),
        digest,
    )


if __name__ == "__main__":
    run(main, *sys.argv[1:])
