"""Writes chiasm-vision's goldens of video pixels: hashes of vLLM's tensors of synthetic frames.

    python make_video_pixel_goldens.py [--out crates/chiasm-vision/tests/goldens/videos]

Runs on a CPU in an environment with vLLM and starts no engine. Frame n of a video is the fixture
image of seed n. The frames are picked by vLLM's loader as in make_video_plan_goldens.py, and pass
vLLM's processor with and without rescaling and normalization.
"""

import argparse
import random
import tempfile
import warnings
from pathlib import Path

from families import toy_tokenizer
from families.vllm_truth import FULL_DTYPES, RAW, digest  # first: sets vLLM's environment

import numpy
import torch
import transformers

import fixture_images
from make_family_goldens import versions, write_files, write_lines
from make_video_plan_goldens import Engine, fake_file, patch
from videos.video_models import variants

MODELS = [
    "cosmos_reason1",
    "llava_next_video",
    "llava_onevision",
    "qwen2_5_vl_capped",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_vl",
]
# [frames, fps, width, height]
VIDEOS = [
    [9, 3.0, 61, 83],
    [5, 2.0, 500, 337],
    [30, 30.0, 336, 336],
    [7, 1.0, 384, 384],
    [4, 1.0, 200, 20],
    [12, 6.0, 900, 60],
    [6, 2.0, 640, 360],
    [21, 10.0, 83, 301],
]
MAX_FRAMES = 12
# The kinds of images that depend on the seed, so that all frames differ.
KINDS = ["mix", "noise"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).parents[2] / "crates/chiasm-vision/tests/goldens/videos"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    patch()
    rng = random.Random("video pixels")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            variant = variants()[name]
            work = Path(scratch) / name
            write_files(work, variant.files)
            settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
            toy_tokenizer.write(work, variant.vocabulary, (), (), settings)
            engine = Engine(work, variant)
            videos = VIDEOS + [
                [rng.randint(2, 40), rng.choice([8.0, 24.0]), rng.randint(30, 700), 400]
                for _ in range(2)
            ]
            for video in videos:
                row = case(engine, video, KINDS[len(rows) % len(KINDS)])
                rows.append({"model": name, "video": video} | row)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_lines(arguments.out / "pixels.json", {"versions": versions()}, "videos", rows)
    print(f"{len(rows)} videos")


def case(engine: Engine, video: list, kind: str) -> dict:
    """Returns the hashes of the pixel tensor of one video."""
    frames, fps, width, height = video
    media_io = {"max_frames": MAX_FRAMES, "num_frames": MAX_FRAMES}
    fakes, metadata = engine.load(fake_file(frames, fps), media_io)
    pixels = [
        fixture_images.pixels(kind, width, height, number) for number in metadata["frames_indices"]
    ]
    assert len(fakes) == len(pixels)
    stacked = numpy.stack(pixels)
    tensor = engine.process(stacked, metadata, {})["mm_kwargs"]["video"][0]
    floats = tensor["pixel_values_videos"].data
    raw = engine.process(stacked, metadata, RAW)["mm_kwargs"]["video"][0]
    row = {"kind": kind, "media_io": media_io, "shape": list(floats.shape)}
    for dtype in FULL_DTYPES:
        row[str(dtype).removeprefix("torch.")] = digest(floats.to(dtype))
    if (seconds := tensor.get("second_per_grid_ts")) is not None:
        assert seconds.data.dtype == torch.float32 and not seconds.data.shape
        row["seconds"] = {
            str(dtype).removeprefix("torch."): digest(seconds.data.to(dtype))
            for dtype in FULL_DTYPES
        }
    row["uint8"] = digest(raw["pixel_values_videos"].data)
    assert raw["pixel_values_videos"].data.dtype == torch.uint8
    return row


if __name__ == "__main__":
    main()
