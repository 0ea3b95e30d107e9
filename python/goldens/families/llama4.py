"""Llama 4: tiles on the best canvas and the whole image as another tile, normalized in bfloat16."""

import random

import torch
from transformers.image_utils import SizeDict
from transformers.models.llama4.image_processing_llama4 import (
    find_supported_resolutions,
    get_best_fit,
    get_max_res_without_distortion,
)

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
TILE = 336
VOCABULARY = {
    "<|begin_of_text|>": 200000, "<|end_of_text|>": 200001, "<|eot|>": 200008,
    "<|finetune_right_pad|>": 200018,
    "<|image_start|>": 200080, "<|image_end|>": 200081, "<|tile_x_separator|>": 200084,
    "<|tile_y_separator|>": 200085,
    "<|image|>": 200090, "<|patch|>": 200092,
}  # fmt: skip


def config(**changes) -> dict:
    """Returns the image settings in config.json of Llama-4-Scout-17B-16E-Instruct, with changes."""
    vision = {
        "hidden_size": 1408,
        "image_size": TILE,
        "intermediate_size": 5632,
        "model_type": "llama4_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": 4096,
    }
    settings = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "vocab_size": 202048,
            "max_position_embeddings": 131072,
        },
        "vision_config": with_changes(vision, **changes.pop("vision", {})),
    }
    return with_changes(settings, **changes)


def image_processor(**changes) -> dict:
    """Returns preprocessor_config.json of Llama-4-Scout-17B-16E-Instruct, with changes."""
    settings = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Llama4ImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "input_data_format": None,
        "max_patches": 16,
        "processor_class": "Llama4Processor",
        "resample": 2,
        "rescale_factor": llava.RESCALE,
        "resize_to_max_canvas": False,
        "size": {"height": TILE, "width": TILE},
    }
    return with_changes(settings, **changes)


def processor(**changes) -> dict:
    settings = {
        "fake_image_token": "<|image|>",
        "image_token": "<|image|>",
        "patch_size": 14,
        "processor_class": "Llama4Processor",
    }
    return with_changes(settings, **changes)


# The canvases' own sizes, sizes one pixel off, and shapes between two canvases.
MAIN_SIZES = with_random_sizes("llama4", 8) + [
    (672, 672), (673, 672), (1008, 672), (1344, 1344), (1345, 1344), (336, 5376), (5376, 336),
    (500, 300), (3000, 2000),
    (1344, 335), (10, 3000),
]  # fmt: skip
MAX_CANVAS = {"resize_to_max_canvas": True}
KWARGS = [
    {"max_patches": 4},
    {"max_patches": 1},
    {"max_patches": 25},
    {"size": {"height": 224, "width": 224}},
    {"resample": 3},
    {"do_resize": False},
    {"do_normalize": False},
    {"do_rescale": False},
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
        return Model(files, VOCABULARY, trials, full=full)

    nested = {
        PROCESSOR: processor(image_processor=image_processor(processor_class=...)),
        "config.json": config(),
    }
    small = without_kwargs([(61, 83), (500, 337), (301, 700)])
    canvas_trials = [
        (size, MAX_CANVAS)
        for size in FEW_SIZES + [(1920, 1080), (640, 480), (1345, 1344), (37, 1000)]
    ]
    kwargs_trials = [(size, kwargs) for kwargs in KWARGS for size in [(61, 83), (700, 337)]]
    return {
        "llama_4_scout": model(
            image_processor(),
            without_kwargs(MAIN_SIZES) + canvas_trials + kwargs_trials,
            full=True,
        ),
        "new_file": Model(nested, VOCABULARY, small),
        "not_fast": model(image_processor(image_processor_type="Llama4ImageProcessor"), small),
        "defaults": model({"image_processor_type": "Llama4ImageProcessor"}, processor_file=None),
        "max_canvas": model(image_processor(resize_to_max_canvas=True)),
        "max_patches_5": model(
            image_processor(max_patches=5), without_kwargs(FEW_SIZES + [(1920, 1080), (1080, 1920)])
        ),
        "bicubic": model(image_processor(resample=3), small),
        "lanczos": model(image_processor(resample=1), small),
        "other_mean": model(
            image_processor(
                image_mean=llava.CLIP_MEAN, image_std=llava.CLIP_STD, rescale_factor=1 / 127.5
            ),
            small,
        ),
        "no_normalize": model(image_processor(do_normalize=False), small),
        "no_rescale": model(image_processor(do_rescale=False), small),
        "no_rescale_no_normalize": model(
            image_processor(do_rescale=False, do_normalize=False), small
        ),
        "no_resize": model(image_processor(do_resize=False), small),
        "other_tile": model(
            image_processor(size={"height": 224, "width": 224}), small, vision={"image_size": 224}
        ),
        "tile_not_square": model(image_processor(size={"height": 224, "width": 336}), small),
        "other_shuffle": model(image_processor(), small, vision={"pixel_shuffle_ratio": 0.25}),
    }


def plans() -> tuple[list[str], list[list]]:
    """Returns the canvas in tiles, and the size of the image on the canvas."""
    rng = random.Random("plans of llama4")
    rows = []
    for _ in range(1000):
        max_patches = rng.choice([16, 16, 16, 16, 1, 2, 4, 5, 12, 25])
        resize_to_max_canvas = rng.random() < 0.3
        width, height = (max(1, round(2 ** rng.uniform(0, 13))) for _ in range(2))
        if rng.random() < 0.4:  # sizes of canvases, and ties between the scales of both sides
            scale = rng.uniform(0.05, 6) if rng.random() < 0.5 else 1
            sides = [round(rng.randint(1, 8) * TILE * scale) for _ in range(2)]
            width, height = (max(1, side + rng.choice([-1, 0, 0, 0, 1])) for side in sides)
        resolutions = torch.tensor(
            find_supported_resolutions(max_patches, SizeDict(height=TILE, width=TILE))
        )
        target = get_best_fit(
            (height, width), resolutions, resize_to_max_canvas=resize_to_max_canvas
        )
        limit = target
        if not resize_to_max_canvas:
            limit = tuple(
                min(max(side, TILE), bound)
                for side, bound in zip((height, width), target, strict=True)
            )
        new_height, new_width = (
            max(int(side), 1) for side in get_max_res_without_distortion((height, width), limit)
        )
        tiles = [int(side) // TILE for side in target]
        rows.append(
            [
                width,
                height,
                max_patches,
                int(resize_to_max_canvas),
                tiles[1],
                tiles[0],
                new_width,
                new_height,
            ]
        )
    settings = ["max_patches", "resize_to_max_canvas"]
    results = ["tiles_x", "tiles_y", "resized_width", "resized_height"]
    return ["width", "height", *settings, *results], rows


def engine_accepts(settings: dict, _size, case: dict) -> bool:
    """Returns True if the tiles have the vision tower's size and the right number of embeddings.

    Every tile has the same number of embeddings.
    """
    side = settings["vision_config"]["image_size"]
    shape = case["tensors"]["pixel_values"]["shape"]
    (tiles,) = case["tensors"]["patches_per_image"]["values"]
    per_tile = (side // 14) ** 2 // round(1 / settings["vision_config"]["pixel_shuffle_ratio"] ** 2)
    embeddings = sum(count for _, count, embeds in case["placeholder"] if embeds)
    return shape == [tiles, 3, side, side] and embeddings == tiles * per_tile


FAMILY = Family(prompt="<|image|>", models=models(), engine_accepts=engine_accepts, plans=plans)
