"""Decoding and processing alone, by the code of `python/chiasm_processor` in one process on one thread: `alone.py MODEL MEDIA`.

A file is in memory and its tensors are left in memory: no HTTP, no prompt, no other process, no copies.
"""

import os
import sys

# As in the processes that `chiasm serve` has.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "python/chiasm_processor"))
from chiasm_processor.greeting import greeting  # noqa: E402
from chiasm_processor.processor import Processor  # noqa: E402

from chat import Chats  # noqa: E402
from media import KINDS  # noqa: E402
from turns import take  # noqa: E402

# Beside `turns`, which has made this folder known.
from parent import run  # noqa: E402  # isort: skip


def checksum(made: Any) -> int:
    """The sum of all bytes of all tensors."""
    item, _ = made
    tensors = (element.data for element in item.values() if isinstance(element.data, torch.Tensor))
    return sum(int(np.sum(tensor.contiguous().view(-1).view(torch.uint8).numpy(), dtype=np.uint64)) for tensor in tensors)


def main(model: str, media: str) -> None:
    torch.set_num_threads(1)
    chats, processor = Chats(Path(media)), Processor(["--model", model])
    # Makes one of each modality, as the server of these processes does before it forks them.
    greeting(processor)
    take(
        lambda kind, item, _: (KINDS[kind][0], chats.file(kind, item)),
        lambda given: processor.item(*given, {}, {}),
        checksum,
    )


if __name__ == "__main__":
    run(main, *sys.argv[1:])
