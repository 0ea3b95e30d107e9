"""InternVL in the Hugging Face format: tiles on the grid of the nearest ratio, and a thumbnail."""

import random

from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from families import llava
from families.family import (
    FEW_SIZES,
    Family,
    Model,
    with_changes,
    without_kwargs,
    with_random_sizes,
)

PREPROCESSOR = llava.PREPROCESSOR
PROCESSOR = llava.PROCESSOR
IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]
TILE = 448
VOCABULARY = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
    "<img>": 151665, "</img>": 151666, "<IMG_CONTEXT>": 151667, "<video>": 151674,
}  # fmt: skip
TOKENIZER = {
    "extra_special_tokens": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
}


def config(**changes) -> dict:
    """Returns the image settings in config.json of InternVL3-8B-hf, with changes."""
    vision = {
        "hidden_size": 1024,
        "image_size": [TILE, TILE],
        "intermediate_size": 4096,
        "model_type": "internvl_vision",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
    }
    settings = {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": 151667,
        "model_type": "internvl",
        "text_config": {
            "model_type": "qwen2",
            "vocab_size": 151680,
            "max_position_embeddings": 32768,
        },
        "vision_config": with_changes(vision, **changes.pop("vision", {})),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }
    return with_changes(settings, **changes)


def image_processor(**changes) -> dict:
    """Returns preprocessor_config.json of InternVL3-8B-hf, with changes."""
    settings = {
        "crop_size": None,
        "crop_to_patches": False,
        "do_center_crop": None,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": IMAGENET_MEAN,
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "image_std": IMAGENET_STD,
        "max_patches": 12,
        "min_patches": 1,
        "processor_class": "InternVLProcessor",
        "resample": 3,
        "rescale_factor": llava.RESCALE,
        "size": {"height": TILE, "width": TILE},
    }
    return with_changes(settings, **changes)


def processor(**changes) -> dict:
    return with_changes(
        {"image_seq_length": 256, "processor_class": "InternVLProcessor"}, **changes
    )


# The grids' aspect ratios and ties between them, for few and for many tiles.
MAIN_SIZES = with_random_sizes("internvl", 8) + [
    (449, 448), (700, 400), (800, 600), (896, 448), (1344, 448), (1000, 400), (150, 100),
    (1200, 800),
]  # fmt: skip
WITHOUT_TILES = {"crop_to_patches": False}
KWARGS = [
    WITHOUT_TILES,
    {"max_patches": 4},
    {"max_patches": 1},
    {"min_patches": 3},
    {"min_patches": 2, "max_patches": 2},
    {"min_patches": 5, "max_patches": 3},
    {"size": {"height": 224, "width": 224}},
    {"resample": 2},
    {"do_resize": False},
]


def models() -> dict[str, Model]:
    def model(
        preprocessor: dict,
        trials=without_kwargs(FEW_SIZES),
        processor_file: dict | None = processor(),
        full=False,
        **changes,
    ):
        files = {"config.json": config(**changes), PREPROCESSOR: preprocessor}
        if processor_file is not None:
            files[PROCESSOR] = processor_file
        return Model(files, VOCABULARY, trials, tokenizer_settings=TOKENIZER, full=full)

    nested = {
        PROCESSOR: processor(image_processor=image_processor(processor_class=...)),
        "config.json": config(),
    }
    small = without_kwargs([(61, 83), (500, 337), (301, 700)])
    kwargs = [(size, kwargs) for kwargs in KWARGS for size in [(61, 83), (700, 337)]]
    return {
        "internvl3_8b": model(image_processor(), without_kwargs(MAIN_SIZES) + kwargs, full=True),
        "new_file": Model(nested, VOCABULARY, small, tokenizer_settings=TOKENIZER),
        "not_fast": model(image_processor(image_processor_type="GotOcr2ImageProcessor"), small),
        "defaults": model(
            {"image_processor_type": "GotOcr2ImageProcessor"}, small, processor_file=None
        ),
        "defaults_and_tower": model(
            {"image_processor_type": "GotOcr2ImageProcessor"},
            small,
            processor_file=processor(image_seq_length=169),
            vision={"image_size": [384, 384], "patch_size": [14, 14]},
            image_seq_length=169,
        ),
        # The processor's own default takes precedence over the file.
        "crop_to_patches": model(image_processor(crop_to_patches=True), small),
        "max_patches_3": model(image_processor(max_patches=3)),
        "min_patches_4": model(image_processor(min_patches=4)),
        "bilinear": model(image_processor(resample=2), small),
        "lanczos": model(image_processor(resample=1), small),
        "no_normalize": model(image_processor(do_normalize=False), small),
        "no_resize": model(image_processor(do_resize=False), small),
        "shorter_sequence": model(
            image_processor(), small, processor_file=processor(image_seq_length=64)
        ),
    }


def random_size(rng: random.Random, tile: int) -> tuple[int, int]:
    """Returns a random image size; half of them lie halfway between the ratios of two grids."""
    width, height = (max(1, round(2 ** rng.uniform(0, 12.5))) for _ in range(2))
    if rng.random() < 0.5:
        first, second = (rng.randint(1, 12) / rng.randint(1, 6) for _ in range(2))
        height = rng.choice([tile, 60, 120, 360, 840, 1260, 27720])
        width = max(1, round(height * (first + second) / 2)) + rng.choice([0, 0, 0, 1, -1])
    return max(1, width), height


def plans() -> tuple[list[str], list[list]]:
    rng = random.Random("plans of internvl")
    rows = []
    for _ in range(1000):
        tile = rng.choice([TILE, TILE, 384])
        min_tiles, max_tiles = rng.choice(
            [(1, 12), (1, 12), (1, 12), (1, 6), (1, 40), (4, 12), (2, 2), (1, 1), (3, 2)]
        )
        width, height = random_size(rng, tile)
        columns, lines = get_optimal_tiled_canvas(
            (height, width), (tile, tile), min_tiles, max_tiles
        )
        rows.append([width, height, tile, min_tiles, max_tiles, columns, lines])
    return ["width", "height", "tile", "min_patches", "max_patches", "columns", "rows"], rows


def engine_accepts(settings: dict, _size, case: dict) -> bool:
    """Returns True if the item has the vision tower's size and the right number of embeddings.

    InternS1ImagePixelInputs takes no other size. A tile has one embedding per four patches.
    """
    height, width = settings["vision_config"]["image_size"]
    shape = case["tensors"]["pixel_values"]["shape"]
    patch = settings["vision_config"]["patch_size"][0]
    ratio = settings["downsample_ratio"]
    embeddings = sum(count for _, count, embeds in case["placeholder"] if embeds)
    per_tile = int(height // patch * ratio) * int(width // patch * ratio)
    return shape[-2:] == [height, width] and embeddings == shape[0] * per_tile


FAMILY = Family(prompt="<IMG_CONTEXT>", models=models(), engine_accepts=engine_accepts, plans=plans)
