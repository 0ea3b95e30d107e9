"""Deterministic RGB images from integer formulas; no pixels are committed.

crates/chiasm-vision/tests/vision/fixture_image.rs has the same formulas.
"""

import numpy as np


def pixels(kind: str, width: int, height: int, seed: int) -> np.ndarray:
    """Returns a uint8 array [height, width, 3].

    noise:    independent bytes
    gradient: smooth ramps with a different slope per channel
    checker:  hard edges between 0 and 255, where bicubic weights overshoot
    mix:      the three above in tiles of 16 by 16
    flat:     one value
    """
    y, x, c = np.meshgrid(
        np.arange(height, dtype=np.uint32),
        np.arange(width, dtype=np.uint32),
        np.arange(3, dtype=np.uint32),
        indexing="ij",
    )
    noise = _noise(x, y, c, width, seed)
    gradient = (x * 255 // max(width - 1, 1) + y * 255 // max(height - 1, 1) * (c + 1)) & 255
    checker = ((x // (c + 3) ^ y // 5) & 1) * 255
    if kind == "noise":
        chosen = noise
    elif kind == "gradient":
        chosen = gradient
    elif kind == "checker":
        chosen = checker
    elif kind == "mix":
        chosen = np.choose((x // 16 + y // 16) % 3, [noise, gradient, checker])
    elif kind == "flat":
        chosen = np.full_like(x, seed & 255)
    else:
        raise ValueError(f"unknown kind of image: {kind}")
    return chosen.astype(np.uint8)


def _noise(x: np.ndarray, y: np.ndarray, c: np.ndarray, width: int, seed: int) -> np.ndarray:
    """Returns the low byte of an integer hash of each byte's index; arithmetic is modulo 2**32."""
    with np.errstate(over="ignore"):
        h = ((y * np.uint32(width) + x) * np.uint32(3) + c) * np.uint32(0x9E3779B1)
        h = h + np.uint32(seed * 0x85EBCA77 & 0xFFFFFFFF)
        h = (h ^ h >> np.uint32(15)) * np.uint32(0x2C1B3CCD)
        h = (h ^ h >> np.uint32(12)) * np.uint32(0x297A2D39)
        return (h ^ h >> np.uint32(15)) & np.uint32(255)
