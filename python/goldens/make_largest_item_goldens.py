"""Writes chiasm-vision's golden largest_items.json: the embeddings that vLLM's encoder cache holds.

    python make_largest_item_goldens.py MODEL_DIR... [--out crates/chiasm-vision/tests/goldens]

Needs vLLM and one model directory per family, for example those that
python/models/make_tiny_models.py writes; configs and tokenizer are enough. Starts no engine: vLLM's
scheduler uses the same `MultiModalBudget`. Each case contains the files that it was computed from,
so that the test needs no model directory.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import transformers
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget

FILES = [
    "config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
]
MAX_BATCHED_TOKENS = 2048
# The tokens for videos in vLLM's InternVL.
VIDEO_TOKENS = ["<|video_pad|>", "<|reserved_200000|>"]


def qwen_images(pixels: int) -> dict:
    """Returns changes that allow images of a Qwen-VL model `pixels` pixels."""
    return {("processor_config.json", "image_processor.size.longest_edge"): pixels}


# The limits of the published models.
PUBLISHED_QWEN2 = qwen_images(12845056)
PUBLISHED_QWEN3 = qwen_images(16777216) | {
    ("processor_config.json", "video_processor.size.longest_edge"): 25165824
}
CROPPED = {("processor_config.json", "image_processor.crop_to_patches"): True}
# Per model: (changes, tokens of the context, --mm-processor-kwargs, --limit-mm-per-prompt).
CASES = {
    "qwen2vl": [({}, 8192, {}, {}), (PUBLISHED_QWEN2, 32768, {}, {})],
    "qwen25vl": [
        ({}, 300, {}, {}),
        (PUBLISHED_QWEN2, 128000, {}, {}),
        (PUBLISHED_QWEN2, 8192, {}, {}),
        (PUBLISHED_QWEN2, 50000, {}, {}),
        (PUBLISHED_QWEN2, 128000, {"max_pixels": 1003520}, {}),
        (PUBLISHED_QWEN2, 128000, {"max_pixels": 3000017}, {"video": 0}),
        (PUBLISHED_QWEN2, 128000, {}, {"image": 2, "video": 0}),
        (PUBLISHED_QWEN2, 128000, {}, {"image": 0}),
        (PUBLISHED_QWEN2, 128000, {}, {"image": 0, "video": 0}),
    ],
    "qwen3vl": [
        ({}, 8192, {}, {}),
        (PUBLISHED_QWEN3, 262144, {}, {}),
        (PUBLISHED_QWEN3, 262144, {}, {"video": 0}),
        (PUBLISHED_QWEN3, 262144, {"max_pixels": 4194304}, {}),
    ],
    "qwen3vl_moe": [({}, 8192, {}, {})],
    "qwen35": [({}, 8192, {}, {})],
    "llava": [({}, 2048, {}, {})],
    "llava_next": [({}, 2048, {}, {})],
    "llama4": [({}, 8192, {}, {})],
    "gemma3": [({}, 8192, {}, {}), ({}, 8192, {"do_pan_and_scan": True}, {})],
    "internvl": [
        ({}, 8192, {}, {}),
        ({}, 100, {}, {}),
        ({}, 8192, {}, {"video": 0}),
        ({("processor_config.json", "image_processor.min_patches"): 7}, 8192, {}, {"video": 0}),
        (CROPPED, 8192, {}, {}),
        (CROPPED, 8192, {}, {"video": 0}),
        (
            CROPPED | {("processor_config.json", "image_processor.min_patches"): 7},
            8192,
            {},
            {"video": 0},
        ),
        ({}, 8192, {"crop_to_patches": True, "max_patches": 5}, {"video": 0}),
        (CROPPED, 8192, {"max_patches": 5}, {"video": 0}),
    ],
    "internvl_chat": [
        ({}, 8192, {}, {}),
        ({}, 40000, {}, {"image": 0}),
        ({("config.json", "max_dynamic_patch"): 4}, 8192, {}, {"video": 0}),
        ({("config.json", "dynamic_image_size"): False}, 8192, {}, {"video": 0}),
        ({("config.json", "llm_config.model_type"): "llama"}, 8192, {}, {}),
    ],
    "pixtral": [({}, 8192, {}, {})],
    "mistral3": [({}, 8192, {}, {}), ({}, 8192, {"size": {"longest_edge": 300}}, {})],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL_DIR")
    default = Path(__file__).parents[2] / "crates/chiasm-vision/tests/goldens"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    cases = [case(model, *rest) for model in arguments.models for rest in CASES[model.name]]
    versions = {"vllm": vllm.__version__.split("+")[0], "transformers": transformers.__version__}
    rows = ",\n".join(json.dumps(row) for row in cases)
    head = f'"versions": {json.dumps(versions)}, "step": {MAX_BATCHED_TOKENS}'
    text = f'{{{head}, "cases": [\n{rows}\n]}}\n'
    (arguments.out / "largest_items.json").write_text(text)
    print(f"{len(cases)} cases")


def case(model: Path, changes: dict, context: int, kwargs: dict, limits: dict) -> dict:
    """Returns vLLM's largest items and encoder cache for a changed copy of a model directory."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / model.name
        shutil.copytree(model, work, ignore=shutil.ignore_patterns("*.safetensors"))
        for (name, path), value in changes.items():
            set_value(work / name, path, value)
        files = {
            name: json.loads((work / name).read_text()) for name in FILES if (work / name).exists()
        }
        vocabulary = json.loads((work / "tokenizer.json").read_text())
        known = set(vocabulary["model"]["vocab"]) | {
            token["content"] for token in vocabulary["added_tokens"]
        }
        # The context may be longer than the tiny model's, because the counts do not depend on its
        # weights.
        for part in ("text_config", "llm_config"):
            if part in files["config.json"]:
                set_value(work / "config.json", f"{part}.max_position_embeddings", context)
        arguments = EngineArgs(
            model=str(work),
            dtype="float32",
            max_model_len=context,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            mm_processor_kwargs=kwargs or None,
            limit_mm_per_prompt=limits,
            trust_remote_code=model.name == "internvl_chat",
            load_format="dummy",
        )
        budget = MultiModalBudget(arguments.create_engine_config(), MULTIMODAL_REGISTRY)
    items = dict(budget.mm_max_toks_per_item)
    print(model.name, context, kwargs, limits, items, budget.encoder_cache_size)
    return {
        "model": model.name,
        "lacks": [token for token in VIDEO_TOKENS if token not in known],
        "context": context,
        "kwargs": kwargs,
        "limits": limits,
        "items": items,
        "encoder_cache": budget.encoder_cache_size,
        "files": files,
    }


def set_value(file: Path, path: str, value) -> None:
    """Sets the value at a dotted path in a JSON file."""
    contents = json.loads(file.read_text())
    *parents, key = path.split(".")
    part = contents
    for parent in parents:
        part = part[parent]
    part[key] = value
    file.write_text(json.dumps(contents))


if __name__ == "__main__":
    main()
