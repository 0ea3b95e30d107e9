"""Writes the inputs of whole servers in `cargo xtask bench-peers video`: `caption_inputs.py FOLDER
MODEL`.

- `FOLDER/clips`: clips of which no two have the same pixels. Each is one of some beginnings followed
  by one of some ends, which are encoded once.
- `FOLDER/model`: the tiny model MODEL, a Qwen3-VL, with further files for vLLM's Rust frontend.
"""

import json
import sys
from itertools import product
from pathlib import Path

from long_videos import Clip, concatenate, encode
from servers import copy_model

# Together 420 clips: 400 for the measurement and 20 before it.
BEGINNINGS, ENDS = 20, 21
# The camera's first step in each part. A beginning has 60 frames and an end 90, of 128 steps.
BEGINNING_STEPS, END_STEPS = 6, 5
# vLLM takes two frames per second: ten.
BEGINNING = Clip(2, 640, 360, 250)
END = Clip(3, 640, 360, 250)
# The sections of `processor_config.json` that the Rust frontend reads from files of their own.
SECTIONS = {
    "image_processor": "preprocessor_config.json",
    "video_processor": "video_preprocessor_config.json",
}


def write_clips(folder: Path) -> None:
    beginnings, ends = (
        [(encode(part._replace(first_step=step * number)), part.seconds) for number in range(count)]
        for part, step, count in (
            (BEGINNING, BEGINNING_STEPS, BEGINNINGS),
            (END, END_STEPS, ENDS),
        )
    )
    folder.mkdir()
    for number, parts in enumerate(product(beginnings, ends)):
        (folder / f"{number:03}.mp4").write_bytes(concatenate(list(parts)))


def write_sections(model: Path) -> None:
    config = json.loads((model / "processor_config.json").read_text())
    for section, name in SECTIONS.items():
        (model / name).write_text(json.dumps(config[section]))


def main(folder: Path, model: Path) -> None:
    write_clips(folder / "clips")
    copy_model(model, folder / "model")
    write_sections(folder / "model")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
