"""Decoding and processing alone, by the code of `python/chiasm_processor`: `alone.py MODEL MEDIA`.

One process with one thread, from a file in memory to tensors in memory: no HTTP, no prompt, no
copies.
"""

import os
import sys

# As in the processes of `chiasm serve`.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "python/chiasm_processor"))
from chiasm_processor.greeting import build_greeting  # noqa: E402
from chiasm_processor.processor import Processor  # noqa: E402

from media import KINDS, Requests  # noqa: E402
from turns import serve  # noqa: E402

# From the folder that `turns` has added to the path.
from parent import run  # noqa: E402  # isort: skip


def checksum(processed: Any) -> int:
    """Returns the sum of all bytes of all tensors."""
    item, _ = processed
    tensors = (element.data for element in item.values())
    tensors = (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
    arrays = (tensor.contiguous().view(-1).view(torch.uint8).numpy() for tensor in tensors)
    return sum(int(np.sum(array, dtype=np.uint64)) for array in arrays)


def main(model: str, media: str) -> None:
    torch.set_num_threads(1)
    requests, processor = Requests(Path(media)), Processor(["--model", model])
    # Processes an item of each modality, as the processes' server does before it forks them.
    build_greeting(processor)
    serve(
        lambda kind, item, _: (KINDS[kind][0], requests.file(kind, item)),
        lambda prepared: processor.make_item(*prepared, {}, {}),
        checksum,
    )


if __name__ == "__main__":
    run(main, *sys.argv[1:])
