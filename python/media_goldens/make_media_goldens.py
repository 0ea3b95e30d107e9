#!/usr/bin/env python3
"""Makes the fixtures of chiasm-media: small image files, and what vLLM's own loader makes of them.

    VLLM_TARGET_DEVICE=cpu python make_media_goldens.py

needs vLLM and Pillow 13 (and OpenCV, for the JPEG samplings that Pillow does not write). It writes the files and an
`index.json` to crates/chiasm-media/tests/goldens. An entry is either `pixels` (size and blake3 of the RGB bytes) or
`error`. Where Chiasm differs from vLLM on purpose, the entry is what Chiasm does and the note says why. The files
themselves come from the *_cases modules.
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


def outcome(data):
    try:
        media = ImageMediaIO().load_bytes(data).media
    except Exception as error:
        return {"error": type(error).__name__}
    assert media.mode == "RGB"
    return {"width": media.width, "height": media.height, "rgb_blake3": blake3.blake3(media.tobytes()).hexdigest()}


def stored(data):
    try:
        with Image.open(io.BytesIO(data)) as image:
            return {"format": image.format, "mode": image.mode}
    except Exception:
        return {}


def main():
    for module in (png_cases, jpeg_cases, orientation_cases, webp_cases, gif_cases, bmp_cases, other_cases):
        module.add_all()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    entries = []
    for name, (data, note, refused, same_as) in cases.items():
        entry = {"file": name, **stored(data)}
        vllm_says = outcome(data)
        if refused:
            assert "error" not in vllm_says, f"{name}: vLLM refuses it as well: {vllm_says}"
            entry |= {"error": "refused", "note": note}
        elif same_as is not None:
            assert "error" in vllm_says, f"{name}: vLLM takes it as well"
            entry |= {**outcome(same_as), "note": note}
        else:
            entry |= vllm_says
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
