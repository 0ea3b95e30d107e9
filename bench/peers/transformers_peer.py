"""The peer `transformers`. It gets an order for each round over pipes, one JSON object per line.

    in   {"model": directory, "picture": file, "format": "u8", "bf16" or "f32",
          "tensor": file or null}
    out  {"decode": ms, "process": ms, "whole": ms, and "resize": ms, "layout": ms if separate}

The first line out has the versions. Times are taken around the calls, so pipes do not count. They
are CPU time of the whole process, which runs on one thread. With "tensor", the bytes of the pixel
tensor are written to that file, outside of the times.
"""

import io
import json
import os
import sys
import time
import warnings
from functools import lru_cache
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import PIL
import torch
import transformers
from PIL import Image
from torchvision.transforms.v2 import functional
from transformers import AutoImageProcessor

RAW = {"do_rescale": False, "do_normalize": False}
# As vLLM does, the values are converted to the model's type last.
NORMALIZED = {"bf16": torch.bfloat16, "f32": torch.float32}


def milliseconds(start):
    return (time.process_time() - start) * 1e3


@lru_cache(maxsize=None)
def processor_of(model):
    return AutoImageProcessor.from_pretrained(model)


def decode(data):
    """Decodes as vLLM's loader: converts only if needed."""
    image = Image.open(io.BytesIO(data))
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def process(processor, image, form):
    if form == "u8":
        return processor(images=[image], return_tensors="pt", **RAW)
    outputs = processor(images=[image], return_tensors="pt")
    outputs["pixel_values"] = outputs["pixel_values"].to(NORMALIZED[form])
    return outputs


def separate_stages(processor, image, grid):
    """Returns the times of resize and layout, for raw patches of an image that is resized."""
    pixels = functional.pil_to_tensor(image)[None]
    size = [extent * processor.patch_size for extent in grid[0, 1:].tolist()]
    if size == list(pixels.shape[-2:]):
        return {}
    bicubic = functional.InterpolationMode.BICUBIC
    start = time.process_time()
    resized = functional.resize(pixels, size, interpolation=bicubic, antialias=True)
    resize = milliseconds(start)
    start = time.process_time()
    process(processor, resized[0], "u8")
    return {"resize": resize, "layout": milliseconds(start)}


def measure(order):
    processor = processor_of(order["model"])
    data = Path(order["picture"]).read_bytes()
    start = time.process_time()
    image = decode(data)
    decoded = milliseconds(start)
    outputs = process(processor, image, order["format"])
    whole = milliseconds(start)
    times = {"decode": decoded, "process": whole - decoded, "whole": whole}
    tensor = outputs["pixel_values"]
    if order["format"] == "u8":
        times |= separate_stages(processor, image, outputs["image_grid_thw"])
    if order["tensor"]:
        tensor.contiguous().view(torch.uint8).numpy().tofile(order["tensor"])
    return times


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    versions = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "pillow": PIL.__version__,
    }
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
