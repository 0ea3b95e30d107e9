"""Writes the pictures of the pixel benchmark: `python make_pictures.py DIRECTORY`.

Each picture is made from a formula and a seed. To a codec and a filter it looks like a photograph:
brightness falls off with frequency as in nature, and there are a horizon, round and straight edges
of all sharpnesses, and a sensor's noise. Noise alone would be the worst case of every decoder,
gradients the best.

Needs numpy and Pillow, which any environment of vLLM has.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = [(512, 512), (1024, 1024), (1920, 1080), (3840, 2160)]
THINGS = 40


def clouds(rng, width, height, falloff):
    """Returns a field with mean 0 and deviation 1. Its amplitudes fall with frequency to the power
    of `falloff`."""
    across = np.fft.rfftfreq(width) * width
    down = np.fft.fftfreq(height)[:, None] * height
    frequency = np.hypot(across, down)
    frequency[0, 0] = 1.0
    waves = rng.standard_normal(frequency.shape) + 1j * rng.standard_normal(frequency.shape)
    waves /= frequency**falloff
    waves[0, 0] = 0.0
    field = np.fft.irfft2(waves, s=(height, width))
    return field / field.std()


def picture(width, height):
    rng = np.random.default_rng([width, height])
    y, x = np.mgrid[0:height, 0:width] / height
    horizon = 0.45 + 0.06 * clouds(rng, width, 1, 1.5)
    ground = (y > horizon)[..., None]
    blue = np.array([120.0, 165.0, 225.0])
    sky = blue + 90.0 * y[..., None] + 14.0 * clouds(rng, width, height, 1.8)[..., None]
    soil = np.array([105.0, 120.0, 70.0]) + 22.0 * clouds(rng, width, height, 1.0)[..., None]
    pixels = np.where(ground, soil, sky)
    # From far to near: each thing covers those behind it, and has a texture and a focus of its own.
    for _ in range(THINGS):
        middle_x, middle_y = rng.uniform(0, width / height), rng.uniform(0.2, 1.0)
        half_width, half_height = 0.16 * rng.uniform(0.2, 1.0, 2)
        roundness = rng.choice([2.0, 8.0])
        across, down = (x - middle_x) / half_width, (y - middle_y) / half_height
        shape = np.abs(across) ** roundness + np.abs(down) ** roundness
        blur = rng.uniform(0.01, 0.3)
        cover = np.clip((1.0 - shape) / blur + 0.5, 0.0, 1.0)[..., None]
        colour = rng.uniform(20.0, 235.0, 3)
        light = 30.0 * (across + down)[..., None]
        pixels = pixels * (1.0 - cover) + (colour - light) * cover
    pixels += 6.0 * clouds(rng, width, height, 0.8)[..., None]
    pixels += rng.normal(0.0, 1.5, pixels.shape)
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


def main():
    directory = Path(sys.argv[1])
    for width, height in SIZES:
        image = picture(width, height)
        image.save(directory / f"{width}x{height}.jpg", quality=90, subsampling="4:2:0")
        image.save(directory / f"{width}x{height}.png")


if __name__ == "__main__":
    main()
