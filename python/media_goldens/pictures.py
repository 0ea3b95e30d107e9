"""The contents of the fixtures: pictures for Pillow, and samples and palettes for writers.py."""

import io

import numpy as np
from PIL import Image

from writers import CHANNELS

SIZES = [(1, 1), (1, 23), (23, 1), (2, 3), (7, 5), (16, 16), (37, 23)]


def picture(width, height, seed=0):
    """Returns a gradient with noise and some hard edges."""
    rng = np.random.default_rng(1000 * width + height + seed)
    y, x = np.mgrid[0:height, 0:width]
    base = np.stack(
        [x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), (x * 7 + y * 13) % 256], -1
    )
    noisy = base + rng.integers(-25, 26, base.shape)
    noisy[(x // 5 + y // 4) % 7 == 0] = [250, 20, 60]
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def alpha_gradient(width, height):
    """Returns an alpha plane with all values from 0 to 255, if it has enough pixels."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(((x * 11 + y * 29) % 256).astype(np.uint8))


def with_alpha(image):
    image = image.copy()
    image.putalpha(alpha_gradient(*image.size))
    return image


def save(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def samples(seed, max_value):
    """Returns a deterministic function from a position to a sample in 0..=max_value; not smooth."""
    return lambda x, y, c=0: (
        (x * 37 + y * 101 + c * 59 + seed * 17 + (x * y) % 23)
        * 2654435761
        % 4294967296
        * (max_value + 1)
        >> 32
    )


def palette_bytes(entries):
    return bytes((i * 73 + c * 91 + 5) % 256 for i in range(entries) for c in range(3))


def png_pixel(depth, colour):
    value = samples(depth + colour, (1 << depth) - 1)
    return lambda x, y: [value(x, y, c) for c in range(CHANNELS[colour])]
