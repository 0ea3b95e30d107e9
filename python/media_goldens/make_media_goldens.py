#!/usr/bin/env python3
"""Writes the fixtures of chiasm-media: small image files, and their pixels from vLLM's own loader.

    VLLM_TARGET_DEVICE=cpu python make_media_goldens.py

Needs vLLM, Pillow 13, and OpenCV for the JPEG samplings that Pillow does not write. Writes the
files of the *_cases modules and an `index.json` to crates/chiasm-media/tests/goldens. An entry has
either the size and the blake3 hash of the RGB bytes, or an `error`. Where Chiasm differs from vLLM
on purpose, the entry has Chiasm's result and a note with the reason.
"""

import io
import json
import os
import shutil
import warnings
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
warnings.simplefilter("ignore")

import blake3
import cv2
import numpy as np
import PIL
import vllm
from PIL import Image, features
from vllm.multimodal.media import ImageMediaIO

import bmp_cases
import gif_cases
import jpeg_cases
import orientation_cases
import other_cases
import png_cases
import webp_cases
from cases import cases

OUT = Path(__file__).resolve().parents[2] / "crates/chiasm-media/tests/goldens"


def load_with_vllm(data):
    """Returns the size and the hash of vLLM's pixels, or the type of its error."""
    try:
        media = ImageMediaIO().load_bytes(data).media
    except Exception as error:
        return {"error": type(error).__name__}
    assert media.mode == "RGB"
    return {
        "width": media.width,
        "height": media.height,
        "rgb_blake3": blake3.blake3(media.tobytes()).hexdigest(),
    }


def describe_file(data):
    """Returns Pillow's format and mode of a file; empty if Pillow does not know the format."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return {"format": image.format, "mode": image.mode}
    except Exception:
        return {}


def main():
    for module in (
        png_cases,
        jpeg_cases,
        orientation_cases,
        webp_cases,
        gif_cases,
        bmp_cases,
        other_cases,
    ):
        module.add_all()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    entries = []
    for name, (data, note, refused, same_as) in cases.items():
        entry = {"file": name, **describe_file(data)}
        expected = load_with_vllm(data)
        if refused:
            assert "error" not in expected, f"{name}: vLLM refuses it as well: {expected}"
            entry |= {"error": "refused", "note": note}
        elif same_as is not None:
            assert "error" in expected, f"{name}: vLLM takes it as well"
            entry |= {**load_with_vllm(same_as), "note": note}
        else:
            entry |= expected
        (OUT / name).write_bytes(data)
        entries.append(entry)
    made_with = {
        "vllm": vllm.__version__,
        "pillow": PIL.__version__,
        "libjpeg_turbo": features.version("libjpeg_turbo"),
        "webp": features.version("webp"),
        "zlib": features.version("zlib"),
        "zlib_ng": features.version("zlib_ng"),
        "opencv": cv2.__version__,
        "numpy": np.__version__,
    }
    lines = ",\n".join("    " + json.dumps(entry) for entry in entries)
    index = f'{{\n  "made_with": {json.dumps(made_with)},\n  "images": [\n{lines}\n  ]\n}}\n'
    (OUT / "index.json").write_text(index)
    total = sum(path.stat().st_size for path in OUT.iterdir())
    errors = sum("error" in entry for entry in entries)
    print(f"{len(entries)} images, {errors} of them errors, {total} bytes")


if __name__ == "__main__":
    main()
