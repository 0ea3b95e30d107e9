"""The images: raw patches as from the image processor of Qwen2-VL, of bytes that look random.

`crates/chiasm-engine/examples/handoff` has the same images, and compares checksums.
"""

import zlib

import numpy as np
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)

# 3 channels, 2 frames, 14 x 14 pixels.
PATCH_BYTES = 3 * 2 * 14 * 14


def pixels(height, width, seed):
    """Returns the patches of an image with its size in patches: splitmix64 of seed + 1, seed + 2,
    …, little-endian."""
    rows = height * width
    length = rows * PATCH_BYTES
    z = np.arange(1, length // 8 + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = (z + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return torch.from_numpy(z.astype("<u8").view(np.uint8)).view(rows, PATCH_BYTES)


def item(height, width, seed):
    """Returns the image as vLLM's processor passes it on."""
    patches = MultiModalFlatField(slices=[slice(0, height * width)], dim=0)
    grid = torch.tensor([1, height, width])
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(data=pixels(height, width, seed), field=patches),
            "image_grid_thw": MultiModalFieldElem(
                data=grid, field=MultiModalBatchedField(keep_on_cpu=True)
            ),
        }
    )


def checksum(item):
    """Returns the CRC-32 of the patches in memory."""
    patches = item["pixel_values"].data
    assert patches.dtype == torch.uint8 and patches.is_contiguous()
    return zlib.crc32(patches.numpy().reshape(-1))
