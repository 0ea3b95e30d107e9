"""Writes the goldens of chiasm-vision: the output of `transformers` for fixture images, on a CPU.

    python make_vision_goldens.py [--out crates/chiasm-vision/tests/goldens]

Needs `transformers`, torch, torchvision, Pillow and blake3, which any environment with vLLM has.
The images come from formulas (fixture_images.py). The outputs are recorded as hashes, and a few
small ones in full for debugging. `index.json` records the versions.
"""

import argparse
import json
import platform
import random
import shutil
import warnings
from pathlib import Path

import blake3
import numpy as np
import PIL
import torch
import torchvision
import transformers
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
    Qwen2VLImageProcessor,
    smart_resize,
)

import fixture_images
import model_configs

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
RAW = {"do_rescale": False, "do_normalize": False}

# (width, height): each is tried with the own settings of every family.
SIZES = [
    # tiny, and strips of one pixel
    (1, 1), (2, 3), (3, 2), (1, 2), (1, 28), (28, 1), (1, 199), (1, 200), (200, 1), (3, 600),
    (600, 3),
    # over 200:1
    (1, 201), (201, 1), (3, 601), (5, 1001), (1001, 5),
    # halves of the factor, which round to even; exact multiples; one off
    (14, 42), (42, 14), (16, 48), (70, 98), (80, 112), (28, 28), (32, 32), (56, 56), (64, 64),
    (27, 29), (31, 33),
    (280, 224), (224, 280), (256, 256), (288, 224), (255, 257),
    # one side keeps its length: a single pass
    (280, 230), (285, 224), (256, 250), (250, 256),
    # everyday sizes, up to downscaling in both directions
    (100, 100), (333, 517), (640, 480), (480, 640), (1024, 768), (1920, 1080), (1080, 1920),
    (1001, 1003),
    # extreme but allowed
    (4000, 20), (20, 4000), (2600, 13), (7, 1399), (1399, 7), (2000, 11),
]  # fmt: skip

# Requests that force upscaling and downscaling.
KWARGS = [
    {"min_pixels": 200000},
    {"max_pixels": 20000},
    {"max_pixels": 1},
    {"min_pixels": 100000, "max_pixels": 120000},
    {"min_pixels": 300000, "max_pixels": 1000},
    {"size": {"shortest_edge": 784, "longest_edge": 5000}},
    {"size": {"shortest_edge": 784, "longest_edge": 5000}, "max_pixels": 60000},
]
# The last two reach the widest filters: above a scale of 128 the fixed-point weights get no finer.
KWARGS_SIZES = [
    (1, 1), (1, 150), (61, 83), (83, 61), (300, 200), (517, 333), (28, 56), (1200, 9), (800, 1200),
    (9000, 46), (46, 9000),
]  # fmt: skip

# The cases whose tensors are kept in full: (model, size, kwargs).
WHOLE = [
    ("qwen2_vl", (61, 83), {"max_pixels": 1}),
    ("qwen2_5_vl", (28, 56), {"min_pixels": 100, "max_pixels": 2000}),
    ("qwen3_vl", (83, 61), {"max_pixels": 2048}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).parents[2] / "crates/chiasm-vision/tests/goldens"
    parser.add_argument("--out", type=Path, default=default)
    out = parser.parse_args().out
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()

    for old in ("models", "tensors"):
        shutil.rmtree(out / old, ignore_errors=True)
    (out / "tensors").mkdir(parents=True)
    models = {}
    cases = []
    for number, name in enumerate(model_configs.write(out / "models")):
        processor, models[name] = load(out / "models" / name)
        if processor is None:
            continue
        for size, kwargs in trials(name):
            kind = ["mix", "noise", "checker", "gradient"][len(cases) % 4]
            cases.append(case(name, processor, kind, size, len(cases) + number, kwargs))
    for number, (name, size, kwargs) in enumerate(WHOLE):
        processor, _ = load(out / "models" / name)
        keep = out / "tensors" / f"{name}.{{}}.bin"
        cases.append(case(name, processor, "mix", size, 1000 + number, kwargs, keep))

    versions = {
        "python": platform.python_version(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "pillow": PIL.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    write_lines(out / "index.json", {"versions": versions, "models": models}, "cases", cases)
    write_lines(out / "plans.json", {"versions": versions}, "plans", plans())
    print(f"{len(models)} models, {len(cases)} images")


def load(directory: Path) -> tuple[Qwen2VLImageProcessor | None, dict]:
    """Returns the processor as vLLM loads it, and the model's entry of the index."""
    try:
        processor = AutoImageProcessor.from_pretrained(directory)
        assert type(processor) is Qwen2VLImageProcessor, type(processor)
        # Some settings load and fail on the first image.
        multiple = processor.patch_size * processor.merge_size
        processor(Image.new("RGB", (multiple, multiple)), return_tensors="pt")
    except (ValueError, TypeError, AttributeError, OSError) as error:
        return None, {"error": type(error).__name__}
    return processor, {"patch": processor.patch_size, "merge": processor.merge_size}


def trials(model: str) -> list[tuple[tuple[int, int], dict]]:
    """Returns the sizes and kwargs to try with a model."""
    if model not in FAMILIES:
        sizes = (
            [(84, 56), (48, 72), (61, 83)]
            if model in ("no_resize", "null_do_resize")
            else [(61, 83), (500, 400)]
        )
        return [(size, {}) for size in sizes]
    rng = random.Random(f"sizes of {model}")
    random_sizes = [
        (round(2 ** rng.uniform(0, 10)), round(2 ** rng.uniform(3, 10))) for _ in range(12)
    ]
    trials = [(size, {}) for size in SIZES + random_sizes]
    return trials + [(size, kwargs) for kwargs in KWARGS for size in KWARGS_SIZES]


def case(model, processor, kind, size, seed, kwargs, keep=None) -> dict:
    """Returns the processor's output for one image, raw and normalized."""
    width, height = size
    case = {"model": model, "image": {"kind": kind, "width": width, "height": height, "seed": seed}}
    if kwargs:
        case["kwargs"] = kwargs
    image = Image.fromarray(fixture_images.pixels(kind, width, height, seed))
    try:
        raw = processor(image, return_tensors="pt", **kwargs, **RAW)
        normal = processor(image, return_tensors="pt", **kwargs)
    except (ValueError, RuntimeError) as error:
        return case | {"error": str(error).split(":")[0][:60]}
    pixels = raw["pixel_values"]
    assert pixels.dtype == torch.uint8
    # If the model's own settings switch rescaling and normalization off, the processor returns
    # bytes, which vLLM casts to the model's type.
    normalized = normal["pixel_values"].to(torch.float32)
    case["grid"] = raw["image_grid_thw"][0].tolist()
    case["tokens"] = int(raw["image_grid_thw"].prod()) // processor.merge_size**2
    tensors = {
        "uint8": pixels.numpy(),
        "float32": normalized.numpy(),
        "float16": normalized.to(torch.float16).numpy(),
        "bfloat16": normalized.to(torch.bfloat16).view(torch.int16).numpy(),
    }
    case["shape"] = list(pixels.shape)
    for dtype, tensor in tensors.items():
        contents = np.ascontiguousarray(tensor).tobytes()
        case[dtype] = blake3.blake3(contents).hexdigest()
        if keep is not None and dtype in ("uint8", "float32"):
            path = Path(str(keep).format(dtype))
            path.write_bytes(contents)
            case.setdefault("whole", {})[dtype] = path.name
    return case


def plans() -> list[list]:
    """Returns rows [factor, width, height, min_pixels, max_pixels, new width, new height].

    Both new sides are 0 for ratios over 200:1.
    """
    rng = random.Random("plans")
    rows = []
    for _ in range(3000):
        factor = rng.choice([28, 32])
        width, height = (max(1, round(2 ** rng.uniform(0, 16))) for _ in range(2))
        if rng.random() < 0.5:  # everyday shapes
            height = max(1, round(width * 2 ** rng.uniform(-2, 2)))
        if rng.random() < 0.1:  # ratios around 200:1
            height = width * 200 + rng.choice([-1, 0, 0, 1])
        if rng.random() < 0.2:  # multiples of half the factor
            width, height = (max(1, side * 2 // factor) * factor // 2 for side in (width, height))
        low = rng.choice([1, 784, 3136, 65536, round(2 ** rng.uniform(0, 24))])
        high = rng.choice([1, 1003520, 12845056, 16777216, round(2 ** rng.uniform(0, 28))])
        try:
            new_height, new_width = smart_resize(height, width, factor, low, high)
        except ValueError:
            new_height = new_width = 0
        rows.append([factor, width, height, low, high, new_width, new_height])
    return rows


def write_lines(path: Path, head: dict, key: str, rows: list) -> None:
    """Writes JSON with one row per line, for readable diffs."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    fields = "".join(
        f"{json.dumps(name)}: {json.dumps(value, indent=1)},\n" for name, value in head.items()
    )
    path.write_text(f"{{\n{fields}{json.dumps(key)}: [\n{lines}\n]\n}}\n")


if __name__ == "__main__":
    main()
