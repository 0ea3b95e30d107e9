"""Writes chiasm-vision's engine_kwargs.json: requests with kwargs to engines with kwargs in vLLM.

    python make_engine_kwargs_goldens.py [--out crates/chiasm-vision/tests/goldens]

Runs on a CPU in an environment with vLLM and starts no engine. Each model gets every combination of
a value for `--mm-processor-kwargs` and the `mm_processor_kwargs` of a request. A row has the
placeholder, the shape of the pixels and the start of their hash, or null if vLLM refuses it.
"""

import argparse
import copy
import importlib
import itertools
import json
import tempfile
import warnings
from pathlib import Path

from families import qwen_more, toy_tokenizer
from families.vllm_truth import ProcessorError, VllmProcessor  # first: sets vLLM's environment

import torch
import transformers
from PIL import Image

import fixture_images
from families.family import Family, Model
from make_family_goldens import COMPACT, versions, write_files, write_lines

KIND = "mix"
SIZE = (500, 300)
HASH_DIGITS = 16


def subsets(settings: dict) -> list[dict]:
    """Returns all combinations of the settings; `size.x` is the key `x` of `size`."""
    found = []
    for count in range(len(settings) + 1):
        for keys in itertools.combinations(settings, count):
            kwargs = {}
            for key in keys:
                *parent, name = key.split(".")
                place = kwargs.setdefault(parent[0], {}) if parent else kwargs
                place[name] = settings[key]
            found.append(kwargs)
    return found


# The areas differ from each other, and the image's is between the edges.
QWEN_ENGINE = subsets(
    {
        "min_pixels": 240000,
        "max_pixels": 40000,
        "size.shortest_edge": 350000,
        "size.longest_edge": 100000,
    }
) + [{"size": {}}, {"max_pixels": 400000, "size": {"shortest_edge": 200000}}]
QWEN_REQUEST = subsets(
    {
        "min_pixels": 290000,
        "max_pixels": 70000,
        "size.shortest_edge": 420000,
        "size.longest_edge": 130000,
    }
) + [{"size": {}}, {"size": None}, {"size": {"shortest_edge": 5000, "longest_edge": 900000}}]
# Model → kwargs of engines, kwargs of requests.
PAIRS = {
    "models/qwen2_vl": (QWEN_ENGINE, QWEN_REQUEST),
    "families/qwen_more/models/cosmos_reason1_7b": (QWEN_ENGINE, QWEN_REQUEST),
    "families/qwen_more/models/cosmos_reason2_8b": (QWEN_ENGINE, QWEN_REQUEST),
    "families/qwen_more/models/qwen3_5_27b": (QWEN_ENGINE, QWEN_REQUEST),
    "families/llava/models/llava_1_5": (
        [
            {},
            {"resample": 2},
            {"size": 336, "do_center_crop": False},
            {"size": {"shortest_edge": 400}},
            {"size": {"height": 336, "width": 336}},
            {"do_center_crop": False, "size": {"height": 336, "width": 336}},
            {"crop_size": 336, "resample": 1},
            {"do_resize": False},
        ],
        [
            {},
            {"resample": 3},
            {"size": 350},
            {"size": {"shortest_edge": 370}},
            {"size": {"height": 336, "width": 336}},
            {"do_center_crop": True},
            {"do_resize": True},
            {"crop_size": {"height": 336, "width": 336}},
        ],
    ),
    "families/gemma3/models/gemma_3_4b": (
        [
            {},
            {"do_pan_and_scan": True},
            {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 100},
            {"pan_and_scan_max_num_crops": 2, "pan_and_scan_min_crop_size": 100},
            {"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": 3.0},
        ],
        [
            {},
            {"do_pan_and_scan": False},
            {"do_pan_and_scan": True},
            {"pan_and_scan_min_crop_size": 120},
            {"pan_and_scan_max_num_crops": 3, "pan_and_scan_min_crop_size": 50},
            {"pan_and_scan_min_ratio_to_activate": 1.1, "pan_and_scan_min_crop_size": 90},
        ],
    ),
    "families/llama4/models/defaults": (
        [{}, {"resize_to_max_canvas": True}, {"resize_to_max_canvas": False}],
        [{}, {"resize_to_max_canvas": True}, {"resize_to_max_canvas": False}],
    ),
    "families/internvl/models/internvl3_8b": (
        [
            {},
            {"crop_to_patches": False},
            {"crop_to_patches": True, "max_patches": 4},
            {"max_patches": 6},
            {"min_patches": 3},
            {"min_patches": 3, "max_patches": 5},
        ],
        [
            {},
            {"crop_to_patches": False},
            {"crop_to_patches": True},
            {"max_patches": 8},
            {"max_patches": 2},
            {"min_patches": 4},
            {"min_patches": 1, "max_patches": 3},
        ],
    ),
    "families/internvl_chat/models/internvl2_5_1b": (
        [
            {},
            {"max_dynamic_patch": 4},
            {"min_dynamic_patch": 3},
            {"use_thumbnail": False},
            {"dynamic_image_size": False},
            {"dynamic_image_size": False, "max_dynamic_patch": 6},
        ],
        [
            {},
            {"max_dynamic_patch": 8},
            {"min_dynamic_patch": 4, "max_dynamic_patch": 5},
            {"use_thumbnail": True},
            {"use_thumbnail": False},
            {"dynamic_image_size": True},
            {"dynamic_image_size": False},
        ],
    ),
    "families/mistral3/models/mistral_small_3_1": (
        [
            {},
            {"size": {"longest_edge": 200}},
            {"size": {"longest_edge": 2000}},
            {"size": 200},
        ],
        [{}, {"size": {"longest_edge": 120}}, {"size": {"longest_edge": 400}}, {"size": 150}],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).parents[2] / "crates/chiasm-vision/tests/goldens"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    image = Image.fromarray(fixture_images.pixels(KIND, *SIZE, 0))
    models = {}
    rows = []
    for index, name in enumerate(sorted(PAIRS)):
        engines, requests = PAIRS[name]
        family, model = describe_model(name, arguments.out)
        models[name] = {"vocabulary": model.vocabulary}
        for engine in engines:
            with tempfile.TemporaryDirectory() as scratch:
                work = Path(scratch) / "model"
                processor = load(work, model, engine)
                models[name]["texts"] = {text: processor.encode(text) for text in model.texts}
                for request in requests:
                    result = outcome(processor, family, model, image, request)
                    rows.append([index, engine, request, result])
        print(name, len(engines) * len(requests), flush=True)
    head = {
        "versions": versions(),
        "image": {"kind": KIND, "width": SIZE[0], "height": SIZE[1], "seed": 0},
        "models": models,
    }
    write_lines(arguments.out / "engine_kwargs.json", head, "rows", rows, COMPACT)
    print(f"{len(rows)} rows, {sum(row[3] is None for row in rows)} failures")


def describe_model(name: str, goldens: Path) -> tuple[Family, Model]:
    """Returns the family and the model of a directory of goldens."""
    kind, *rest = name.split("/")
    if kind == "families":
        family = importlib.import_module(f"families.{rest[0]}").FAMILY
        return family, family.models[rest[-1]]
    files = {path.name: json.loads(path.read_text()) for path in (goldens / name).glob("*.json")}
    files["config.json"] |= {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "video_token_id": qwen_more.OLD_IDS["<|video_pad|>"],
        "vision_start_token_id": qwen_more.OLD_IDS["<|vision_start|>"],
        "vision_end_token_id": qwen_more.OLD_IDS["<|vision_end|>"],
    }
    files["video_preprocessor_config.json"] = {"video_processor_type": "Qwen2VLVideoProcessor"}
    return qwen_more.FAMILY, Model(files, qwen_more.OLD_IDS, [])


def load(work: Path, model: Model, engine: dict) -> VllmProcessor:
    """Returns vLLM's processor of a model for an engine with these kwargs."""
    write_files(work, model.files)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | model.tokenizer_settings
    toy_tokenizer.write(work, model.vocabulary, model.plain_tokens, model.merges, settings)
    return VllmProcessor(work, copy.deepcopy(engine))


def outcome(
    processor: VllmProcessor, family: Family, model: Model, image: Image.Image, request: dict
) -> list | None:
    """Returns [placeholder, shape, hash] of a request's image, or None if vLLM refuses it."""
    try:
        # vLLM changes the kwargs.
        kwargs = copy.deepcopy(request)
        item = processor.describe_item(image, family.prompt, kwargs, full=False)
    except ProcessorError:
        return None
    if not family.engine_accepts(model.files["config.json"], SIZE, item):
        return None
    (pixels,) = (
        tensor for name, tensor in item["tensors"].items() if name.startswith("pixel_values")
    )
    return [item["placeholder"], pixels["shape"], pixels["float32"][:HASH_DIGITS]]


if __name__ == "__main__":
    main()
