"""Writes chiasm-vision's goldens of video plans: what vLLM makes of videos of random properties.

    python make_video_plan_goldens.py [--count N] [--out crates/chiasm-vision/tests/goldens/videos]

Runs on a CPU in an environment with vLLM and starts no engine. No video is decoded:

- A fake `cv2.VideoCapture` reports a number of frames, a frame rate and tiny frames. The rest of
  vLLM's path from a request to the sampled frames is real: `VideoMediaIO.merge_kwargs`,
  `MediaConnector.fetch_video`, the loader and the reading of frames.
- The frames then become a meta tensor of the wanted size, which has a shape and no data. vLLM's
  multimodal processor and the video processor of `transformers` compute its shapes as usual.

So sizes, tokens and small tensors come from the real code; pixels do not exist here.
The script ends with real files, for which the fakes must not change a plan. long_videos.json has
the frames that the loaders alone pick of videos of up to four million frames.
"""

import argparse
import base64
import itertools
import json
import random
import struct
import tempfile
import time
import warnings
from pathlib import Path

from families import toy_tokenizer
from families.vllm_truth import run_lengths  # first: sets vLLM's environment

import blake3
import numpy
import torch
import transformers
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_processing_utils import VideoProcessorMixin
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.media.connector import MediaConnector
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY
from vllm.multimodal.video_decoders import VideoSourceMetadata, VideoTargetMetadata, opencv
from vllm.transformers_utils.processor import get_video_processor_cls_name

from make_family_goldens import COMPACT, versions, write_files, write_lines
from videos.video_models import Variant, variants

FPS = [24.0, 25.0, 30.0, 60.0, 15.0, 10.0, 1.0, 30000 / 1001, 24000 / 1001, 60000 / 1001]
SIZES = [
    (1920, 1080), (1280, 720), (640, 360), (640, 480), (3840, 2160), (1080, 1920), (720, 1280),
    (854, 480), (320, 240), (336, 336), (384, 384),
]  # fmt: skip
# Requests to each engine with mm_processor_kwargs: a video that they shrink and one that they
# enlarge.
ENGINE_KWARGS_VIDEOS = [[48, 24.0, 1280, 720], [48, 24.0, 160, 90]]
REQUEST_KWARGS = [
    {},
    {"size": None},
    {"size": {}},
    {"size": {"shortest_edge": 4096}},
    {"size": {"longest_edge": 1500000}},
    {"size": {"longest_edge": 200000}},
    {"size": {"shortest_edge": 4096, "longest_edge": 1500000}},
    {"size": {"shortest_edge": 4096, "longest_edge": 200000}},
    {"min_pixels": 300000},
    {"max_pixels": 1000000},
    {"max_pixels": 60000},
    {"size": {"longest_edge": 1500000}, "max_pixels": 60000},
    {"size": {"shortest_edge": 4096, "longest_edge": 60000}, "max_pixels": 1500000},
    {"size": None, "max_pixels": 70000},
]
LONG_VIDEOS = 500
REAL_FILES = 120
# The start of a fake file.
FAKE = b"fake:"
TIMESTAMP_CHARACTERS = "<>. second0123456789"


class FakeCapture:
    """A `cv2.VideoCapture` of a video whose frames are all readable.

    As in OpenCV 5.0, the only frame of a video cannot be read after vLLM's seek to the end.
    """

    def __init__(self, frames: int, fps: float) -> None:
        self.frames = frames
        self.fps = fps
        self.position = 0

    def get(self, name: int) -> float:
        cv2 = opencv.cv2
        return {
            cv2.CAP_PROP_FRAME_COUNT: float(self.frames),
            cv2.CAP_PROP_FPS: self.fps,
            cv2.CAP_PROP_FRAME_WIDTH: 2.0,
            cv2.CAP_PROP_FRAME_HEIGHT: 2.0,
            cv2.CAP_PROP_POS_FRAMES: float(self.position),
        }[name]

    def set(self, name: int, value: float) -> bool:
        cv2 = opencv.cv2
        self.position = self.frames if name == cv2.CAP_PROP_POS_AVI_RATIO else int(value)
        return True

    def grab(self) -> bool:
        self.position += 1
        return self.position <= self.frames and self.frames > 1

    def retrieve(self) -> tuple[bool, numpy.ndarray]:
        return True, numpy.zeros((2, 2, 3), dtype=numpy.uint8)


class Engine:
    """vLLM's loader and processor of one variant."""

    def __init__(self, directory: Path, variant: Variant) -> None:
        self.variant = variant
        self.config = ModelConfig(
            model=str(directory),
            dtype="float32",
            mm_device_do_normalize=False,
            media_io_kwargs={"video": variant.media_io},
            **variant.flags,
        )
        self.processor = MULTIMODAL_REGISTRY.create_processor(self.config)
        self.info = self.processor.info
        self.info.get_hf_processor()
        self.class_name = get_video_processor_cls_name(self.config)
        token = next(token for token in variant.vocabulary if "video" in token)
        self.prompt = self.info.get_tokenizer().encode(token, add_special_tokens=False)
        assert len(self.prompt) == 1

    def load(self, data: bytes, media_io: dict) -> tuple[numpy.ndarray, dict]:
        """Returns the frames and the metadata from vLLM's loader."""
        defaults = self.config.multimodal_config.media_io_kwargs.get("video")
        merged = VideoMediaIO.merge_kwargs(defaults, media_io)
        connector = MediaConnector(media_io_kwargs={"video": merged})
        url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        video = connector.fetch_video(url, video_processor=self.class_name)
        return video.media

    def process(self, frames: torch.Tensor, metadata: dict, kwargs: dict) -> dict:
        """Returns the processed request of one video."""
        inputs = ProcessorInputs(
            prompt=self.prompt,
            mm_data_items=self.info.parse_mm_data({"video": [(frames, metadata)]}),
            mm_uuid_items={"video": ["video"]},
            hf_processor_mm_kwargs=kwargs,
        )
        return self.processor.apply(inputs, TimingContext(enabled=False))


def fake_file(frames: int, fps: float) -> bytes:
    """Returns a file that vLLM opens as a FakeCapture after `patch`."""
    return FAKE + json.dumps([frames, fps]).encode()


def patch() -> list:
    """Lets fake files and meta tensors pass vLLM.

    Returns a list that receives the frames that Qwen3-VL's video processor samples.
    """
    mixin = opencv.OpenCVVideoBackendMixin
    open_video_capture = mixin.open_video_capture

    def open_any(data: bytes):
        if data.startswith(FAKE):
            return FakeCapture(*json.loads(data.removeprefix(FAKE)))
        return open_video_capture(data)

    mixin.open_video_capture = staticmethod(open_any)
    def with_data(value):
        if isinstance(value, torch.Tensor) and value.is_meta:
            return torch.zeros(1, dtype=torch.uint8).expand(value.shape)
        if isinstance(value, dict):
            return {key: with_data(item) for key, item in value.items()}
        return [with_data(item) for item in value] if isinstance(value, list) else value

    preprocess = VideoProcessorMixin.preprocess

    def with_preprocess(self, videos, **kwargs):
        output = preprocess(self, videos, **kwargs)
        output.data = with_data(dict(output.data))
        return output

    VideoProcessorMixin.preprocess = with_preprocess
    sampled = []
    sample_frames = Qwen3VLVideoProcessor.sample_frames

    def recording(self, *arguments, **kwargs):
        indices = sample_frames(self, *arguments, **kwargs)
        sampled.append(indices.tolist())
        return indices

    Qwen3VLVideoProcessor.sample_frames = recording
    return sampled


def describe(
    engine: Engine,
    sampled: list,
    video: list,
    kwargs: dict,
    media_io: dict,
    data: bytes | None = None,
) -> dict:
    """Returns the plan that vLLM makes of a video; raises its error.

    `data` is a file with the properties in `video`; without it, the file is fake.
    """
    frames, fps, width, height = video
    sampled.clear()
    pixels, metadata = engine.load(fake_file(frames, fps) if data is None else data, media_io)
    loaded = metadata["frames_indices"]
    assert len(pixels) == len(loaded)
    if data is None:
        pixels = torch.empty((len(pixels), height, width, 3), dtype=torch.uint8, device="meta")
    # vLLM changes the kwargs.
    result = engine.process(pixels, metadata, json.loads(json.dumps(kwargs)))
    if sampled and max(sampled[-1]) >= len(loaded):
        raise IndexError("only a meta tensor has such frames")
    item = result["mm_kwargs"]["video"][0]
    (place,) = result["mm_placeholders"]["video"]
    tokens = result["prompt_token_ids"][place.offset : place.offset + place.length]
    runs = run_lengths(tokens, place.is_embed)
    chosen = sampled[-1] if sampled else loaded
    shape = list(item["pixel_values_videos"].data.shape)
    seconds = item["second_per_grid_ts"].data.item() if "second_per_grid_ts" in item else None
    timestamps = [float(t) for t in item["timestamps"].data] if "timestamps" in item else None
    grid = item["video_grid_thw"].data.tolist() if "video_grid_thw" in item else None
    assert len(item) == 1 + sum(x is not None for x in (seconds, timestamps, grid))
    return {
        "loader": engine.class_name,
        "loaded": loaded,
        "frames": chosen,
        "grid": grid,
        "shape": shape,
        "runs": runs,
        "timestamps": timestamps,
        "seconds": seconds,
        "video_tokens": tokens.count(engine.prompt[0]),
    }


def result_row(engines: list[Engine], sampled: list, counts: dict, row: list) -> list:
    """Returns [index of the engine, video, kwargs, media_io] with the result.

    Counts the types of vLLM's errors in `counts`.
    """
    index, video, kwargs, media_io = row
    try:
        plan = describe(engines[index], sampled, video, kwargs, media_io)
    except Exception as error:
        while isinstance(error, ValueError) and error.__cause__ is not None:
            error = error.__cause__
        counts[type(error).__name__] = counts.get(type(error).__name__, 0) + 1
        if isinstance(error, (NotImplementedError, AttributeError)):
            print(row, repr(error)[:300], flush=True)
        return [*row, type(error).__name__]
    shape = plan["grid"] or plan["shape"]
    return [*row, [len(plan["loaded"]), shape, plan["video_tokens"], digest(plan)]]


def digest(plan: dict) -> str:
    """Returns a hash of a plan, which tests/vision/video_plans.rs computes as well."""
    hasher = blake3.blake3()

    def integers(values: list[int]) -> None:
        hasher.update(struct.pack(f"<I{len(values)}I", len(values), *values))

    integers(plan["loaded"])
    integers(plan["frames"])
    integers(plan["grid"] or [])
    integers(plan["shape"])
    integers([int(number) for run in plan["runs"] for number in run])
    timestamps = plan["timestamps"] or []
    hasher.update(struct.pack(f"<I{len(timestamps)}d", len(timestamps), *timestamps))
    if plan["seconds"] is not None:
        hasher.update(struct.pack("<f", plan["seconds"]))
    return hasher.hexdigest()[:16]


def random_video(rng: random.Random) -> list:
    """Returns random [frames, fps, width, height]."""
    frames = int(2 ** rng.uniform(0, 14.5))
    if rng.random() < 0.1:
        frames = rng.randint(1, 10)
    fps = rng.choice(FPS) if rng.random() < 0.7 else round(rng.uniform(0.2, 120), 3)
    if rng.random() < 0.03:
        fps = 0.0
    width, height = rng.choice(SIZES)
    if rng.random() < 0.6:
        width, height = (int(2 ** rng.uniform(4, 11.5)) for _ in range(2))
    if rng.random() < 0.02:
        width, height = rng.choice([(1, 40), (3, 3), (700, 3), (2000, 5), (30, 1), (2, 2)])
    return [frames, fps, width, height]


def random_media_io(rng: random.Random) -> dict:
    """Returns random `media_io_kwargs.video`."""
    if rng.random() < 0.45:
        return {}
    choices = {
        "num_frames": lambda: rng.choice([1, 2, 4, 7, 8, 16, 32, 64, 100, -1]),
        "fps": lambda: rng.choice([1, 2, 0.5, 3, 4, 8, 24, 30, 60, 2.7, -1]),
        "video_backend": lambda: rng.choice(["opencv", "qwen2_vl", "qwen3_vl"]),
        "min_frames": lambda: rng.choice([1, 2, 5, 16]),
        "max_frames": lambda: rng.choice([2, 9, 64, 1000]),
        "temporal_patch_size": lambda: rng.choice([1, 2, 4]),
        "backend": lambda: "opencv",
        "frame_recovery": lambda: rng.choice([False, False, True]),
        "max_duration": lambda: 60,
    }
    weights = [6, 6, 1, 1, 1, 0.5, 0.5, 0.3, 0.3]
    keys = rng.choices(list(choices), weights, k=rng.choice([1, 1, 2, 3]))
    return {key: choices[key]() for key in keys}


def random_kwargs(rng: random.Random, family: str) -> dict:
    """Returns random `mm_processor_kwargs`."""
    if rng.random() < 0.6:
        return {}

    def pixels(low: float, high: float) -> int:
        return int(2 ** rng.uniform(low, high))

    choices = {
        "min_pixels": lambda: pixels(8, 18),
        "max_pixels": lambda: pixels(12, 22),
        "size": lambda: {"shortest_edge": pixels(8, 16), "longest_edge": pixels(14, 24)},
        "do_sample_frames": lambda: rng.choice([False] * 4 + [True]),
        "fps": lambda: rng.choice([1, 2, 4.0, 0.5, 3.3]),
        "num_frames": lambda: rng.choice([4, 6, 8, 9, 32]),
        "cap_pixels_per_frame": lambda: rng.choice([True, False]),
    }
    if family == "llava":
        choices = {"do_sample_frames": choices["do_sample_frames"]}
    if family == "qwen3":
        choices["size_"] = lambda: rng.choice(
            [{"longest_edge": pixels(14, 24)}, {"shortest_edge": pixels(8, 16)}]
        )
    keys = rng.sample(list(choices), k=min(len(choices), rng.choice([1, 1, 2, 3])))
    return {key.removesuffix("_"): choices[key]() for key in keys}


def long_video(rng: random.Random) -> list:
    """Returns a row of long_videos.json: the frames that a loader picks of a long video.

    The loader is called directly: the fake capture would count frames for minutes.
    """
    name = rng.choice(["opencv", "qwen2_vl", "qwen2_vl", "qwen3_vl"])
    frames = int(2 ** rng.uniform(10, 22))
    fps = rng.choice(FPS)
    num_frames = rng.choice([32, 500, 2000])
    target_fps = rng.choice([-1, 0.5, 2]) if name == "opencv" else rng.choice([0.01, 0.1, 1, 2])
    source = VideoSourceMetadata(frames, fps, frames / fps)
    target = VideoTargetMetadata(num_frames, target_fps, 300)
    loader = VIDEO_LOADER_REGISTRY.load(name)
    indices = sorted(set(loader.compute_frames_index_to_sample(source, target)))
    contents = struct.pack(f"<{len(indices)}I", *indices)
    settings = {"video_backend": name, "num_frames": num_frames, "fps": target_fps}
    return [frames, fps, settings, len(indices), blake3.blake3(contents).hexdigest()[:16]]


def check_files(engines: list[Engine], sampled: list, count: int) -> None:
    """Checks with real files that fake files and meta tensors do not change a plan."""
    rng = random.Random("files")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "video.mp4"
        for number in range(count):
            engine = engines[number % len(engines)]
            size = (rng.choice([64, 96, 200, 320]), rng.choice([48, 64, 130, 240]))
            frames = rng.choice([1, 2, 3, 5, 8, 17, 40, 90, 200])
            fps = rng.choice([1.0, 5.0, 10.0, 24.0, 30.0])
            write_video(path, frames, fps, size)
            request = (random_kwargs(rng, engine.variant.family), random_media_io(rng))
            plans = []
            for data in [None, path.read_bytes()]:
                try:
                    plan = describe(engine, sampled, [frames, fps, *size], *request, data)
                except Exception:
                    plan = "error"
                plans.append(plan)
            assert plans[0] == plans[1], (frames, fps, size, request, plans)
    print(f"{count} files have the plans of fake files", flush=True)


def write_video(path: Path, frames: int, fps: float, size: tuple[int, int]) -> None:
    cv2 = opencv.cv2
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, size)
    for number in range(frames):
        writer.write(numpy.full((size[1], size[0], 3), number % 256, dtype=numpy.uint8))
    writer.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=3600, help="number of random videos")
    default = Path(__file__).parents[2] / "crates/chiasm-vision/tests/goldens/videos"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument(
        "--explain", type=int, nargs="*", default=[], metavar="ROW", help="print whole plans"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    sampled = patch()
    rng = random.Random("videos")
    models = {}
    engines = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, variant in sorted(variants().items()):
            work = Path(scratch) / name
            write_files(work, variant.files)
            settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
            toy_tokenizer.write(work, variant.vocabulary, (), (), settings)
            started = time.monotonic()
            engine = Engine(work, variant)
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
            engines.append(engine)
            encode = engine.info.get_tokenizer().encode
            models[name] = {
                "files": variant.files,
                "flags": variant.flags,
                "media_io": variant.media_io,
                "characters": {
                    letter: encode(letter, add_special_tokens=False)[0]
                    for letter in sorted(set(TIMESTAMP_CHARACTERS))
                },
            }
        rows = []
        counts = {}
        for number in range(arguments.count):
            index = number % len(engines)
            engine = engines[index]
            video = random_video(rng)
            media_io = random_media_io(rng)
            kwargs = random_kwargs(rng, engine.variant.family)
            rows.append(result_row(engines, sampled, counts, [index, video, kwargs, media_io]))
            if number in arguments.explain:
                plan = describe(engine, sampled, video, kwargs, media_io)
                print(json.dumps({"row": rows[-1], "plan": plan}), flush=True)
        for index, engine in enumerate(engines):
            if "mm_processor_kwargs" not in engine.variant.flags:
                continue
            for video, kwargs in itertools.product(ENGINE_KWARGS_VIDEOS, REQUEST_KWARGS):
                rows.append(result_row(engines, sampled, counts, [index, video, kwargs, {}]))
        print(f"{len(rows)} videos, errors: {counts}", flush=True)
        check_files(engines, sampled, REAL_FILES)
    arguments.out.mkdir(parents=True, exist_ok=True)
    head = {"versions": versions(), "models": models}
    write_lines(arguments.out / "plans.json", head, "videos", rows, COMPACT)
    rows = [long_video(rng) for _ in range(LONG_VIDEOS)]
    head = {"versions": versions()}
    write_lines(arguments.out / "long_videos.json", head, "videos", rows, COMPACT)


if __name__ == "__main__":
    main()
