"""Writes chiasm-vision's golden kwargs.json: the effects of `mm_processor_kwargs` in vLLM.

    python make_vision_kwargs_goldens.py MODEL_DIR... [--out crates/chiasm-vision/tests/goldens]

Needs vLLM and one model directory per family, for example those that
python/models/make_tiny_models.py writes; configs and tokenizer are enough. Starts no engine. A
request that vLLM refuses is recorded as null.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import transformers
import vllm
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext

SIZE = (500, 300)
KWARGS = [
    {},
    {"min_pixels": 160000},
    {"max_pixels": 40000},
    {"min_pixels": 10000, "max_pixels": 40000},
    {"min_pixels": 1000000, "max_pixels": 1000},
    {"max_pixels": 2**63},
    {"size": {"shortest_edge": 160000, "longest_edge": 250000}},
    {"size": {"shortest_edge": 160000}},
    {"size": {"longest_edge": 40000}},
    {"size": {"shortest_edge": 10000, "longest_edge": 40000}, "max_pixels": 90000},
    {"size": {"shortest_edge": 10000, "longest_edge": 500000}, "min_pixels": 300000},
    {"size": {"longest_edge": 40000}, "min_pixels": 22500},
    {"size": {"longest_edge": 40000}, "max_pixels": 22500},
    {"size": {}},
    {"size": None},
    {"size": {}, "min_pixels": 10000, "max_pixels": 40000},
    {"size": 200},
    {"size": [200, 200]},
    {"size": {"height": 200, "width": 200}},
    {"size": {"min_pixels": 10000, "max_pixels": 40000}},
    {"size": {"shortest_edge": 0, "longest_edge": 40000}},
    {"size": {"shortest_edge": 100.5, "longest_edge": 40000}},
    {"size": {"shortest_edge": None, "longest_edge": 40000}},
    {"size": {"shortest_edge": 400, "longest_edge": 40000, "surplus": 1}},
    {"min_pixels": 0},
    {"max_pixels": 0},
    {"max_pixels": -4},
    {"min_pixels": None},
    {"max_pixels": None},
    {"min_pixels": 40000.0},
    {"max_pixels": "40000"},
    {"max_pixels": True},
    {"do_resize": False},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", type=Path, nargs="+")
    default = Path(__file__).parents[2] / "crates/chiasm-vision/tests/goldens"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        config = ModelConfig(model=str(model), dtype="float32")
        dtype = (
            "torch.uint8" if config.multimodal_config.mm_device_do_normalize else "torch.float32"
        )
        processor = MULTIMODAL_REGISTRY.create_processor(config)
        for kwargs in KWARGS:
            rows.append(
                {"model": config.hf_config.model_type, "kwargs": kwargs}
                | outcome(processor, kwargs, dtype)
            )
    head = {
        "versions": {"vllm": vllm.__version__, "transformers": transformers.__version__},
        "image": list(SIZE),
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    (arguments.out / "kwargs.json").write_text(
        f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n'
    )
    print(f"{len(rows)} rows")


def outcome(processor, kwargs: dict, dtype: str) -> dict:
    """Returns the grid and the length of the placeholder; the tensor must have the type `dtype`."""
    info = processor.info
    start, image, end = (
        info.get_tokenizer().convert_tokens_to_ids(token)
        for token in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    )
    try:
        inputs = ProcessorInputs(
            prompt=[start, image, end],
            mm_data_items=info.parse_mm_data({"image": [Image.new("RGB", SIZE)]}),
            hf_processor_mm_kwargs=kwargs,
        )
        result = processor.apply(inputs, TimingContext(enabled=False))
    except (ValueError, TypeError):
        return {"grid": None}
    item = result["mm_kwargs"]["image"][0]
    assert str(item["pixel_values"].data.dtype) == dtype
    grid = item["image_grid_thw"].data.tolist()
    return {"grid": grid, "tokens": result["mm_placeholders"]["image"][0].length}


if __name__ == "__main__":
    main()
