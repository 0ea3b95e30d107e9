"""LLaVA-NeXT: the whole image, and its tiles on the grid that wastes the least area ("anyres")."""

import random

import numpy as np
from transformers import LlavaNextConfig
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape
from vllm.model_executor.models.llava_next import LlavaNextProcessingInfo

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
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
# granite-vision-3.1-2b: up to ten tiles of 384 by 384.
GRANITE_PINPOINTS = [
    [384 * rows, 384 * columns]
    for rows in range(1, 11)
    for columns in range(1, 11)
    if 1 < rows * columns <= 10
]
GRANITE_VISION = llava.SIGLIP | {"hidden_size": 1152, "intermediate_size": 4304}
# Grids of one tile, and grids whose sides are no multiples of the tile.
ODD_PINPOINTS = [[336, 336], [700, 500], [100, 1000]]


def config(**changes) -> dict:
    """Returns the image settings in config.json of llava-v1.6-mistral-7b-hf, with changes."""
    text = {"model_type": "mistral", "vocab_size": 32064, "max_position_embeddings": 32768}
    settings = {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "image_grid_pinpoints": PINPOINTS,
        "model_type": "llava_next",
        "text_config": text,
    }
    return llava.config(**(settings | changes))


def image_processor(**changes) -> dict:
    """Returns preprocessor_config.json of llava-v1.6-mistral-7b-hf, with changes."""
    settings = {
        "aspect_ratio_setting": "anyres",
        "do_pad": True,
        "image_grid_pinpoints": PINPOINTS,
        "image_processor_type": "LlavaNextImageProcessor",
        "processor_class": "LlavaNextProcessor",
    }
    return llava.image_processor(**(settings | changes))


def processor(**changes) -> dict:
    return llava.processor(**({"processor_class": "LlavaNextProcessor"} | changes))


# The grids' own aspect ratios, ties between grids, and sizes one pixel off.
MAIN_SIZES = with_random_sizes("llava_next") + [
    (672, 672), (671, 673), (1008, 336), (1009, 336), (1007, 336), (300, 300), (168, 336),
    (337, 674), (5, 7),
    (1300, 1299),
]  # fmt: skip
KWARGS = [
    {"size": {"shortest_edge": 200}},
    {"size": {"height": 336, "width": 336}},
    {"image_grid_pinpoints": [[672, 672]]},
    {"do_resize": False},
    {"do_pad": False},
    {"resample": 2},
    {"crop_size": {"height": 168, "width": 168}},
    {"do_center_crop": False},
]


def models() -> dict[str, Model]:
    def model(
        preprocessor: dict,
        trials=without_kwargs(FEW_SIZES),
        processor_file: dict | None = processor(),
        ids=llava.VOCABULARY,
        full=False,
        **changes,
    ) -> Model:
        files = {"config.json": config(**changes), PREPROCESSOR: preprocessor}
        if processor_file is not None:
            files[PROCESSOR] = processor_file
        return Model(files, ids, trials, full=full)

    nested = {
        PROCESSOR: processor(image_processor=image_processor(processor_class=...)),
        "config.json": config(),
    }
    vicuna = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
    yi = {"model_type": "llama", "vocab_size": 64064, "max_position_embeddings": 4096}
    small = without_kwargs([(61, 83), (500, 337), (900, 60)])
    kwargs = [(size, kwargs) for kwargs in KWARGS for size in [(61, 83), (301, 700)]]
    return {
        "v1_6_mistral": model(image_processor(), without_kwargs(MAIN_SIZES) + kwargs, full=True),
        "v1_6_vicuna": model(image_processor(), small, text_config=vicuna),
        "v1_6_34b": model(
            image_processor(),
            small,
            ids={"<|startoftext|>": 1, "<|endoftext|>": 2, "<image>": 64000},
            text_config=yi,
            image_token_index=64000,
        ),
        "granite_vision": model(
            image_processor(
                crop_size={"height": 384, "width": 384},
                image_grid_pinpoints=GRANITE_PINPOINTS,
                image_mean=[0.5] * 3,
                image_std=[0.5] * 3,
                size={"height": 384, "width": 384},
            ),
            without_kwargs(FEW_SIZES + [(1920, 1080), (1080, 1920), (2600, 13), (383, 770)]),
            image_grid_pinpoints=GRANITE_PINPOINTS,
            vision=GRANITE_VISION,
            vision_feature_select_strategy="full",
            vision_feature_layer=[-24, -20, -12, -1],
        ),
        "new_file": Model(nested, llava.VOCABULARY, small),
        "fast": model(image_processor(image_processor_type="LlavaNextImageProcessorFast"), small),
        "defaults": model(
            {"image_processor_type": "LlavaNextImageProcessor"},
            vision={"image_size": 224},
            processor_file=None,
        ),
        "odd_pinpoints": model(
            image_processor(image_grid_pinpoints=ODD_PINPOINTS), image_grid_pinpoints=ODD_PINPOINTS
        ),
        "pinpoints_differ": model(image_processor(image_grid_pinpoints=[[672, 672]]), small),
        "bilinear": model(image_processor(resample=2), small),
        "lanczos": model(image_processor(resample=1), small),
        "no_center_crop": model(image_processor(do_center_crop=False), small),
        "no_resize": model(image_processor(do_resize=False), small),
        "square_size": model(image_processor(size={"height": 336, "width": 336}), small),
        "no_pad": model(image_processor(do_pad=False), small),
        "crop_smaller_than_size": model(
            image_processor(crop_size={"height": 224, "width": 224}), small
        ),
        "no_pinpoints": model(
            with_changes(image_processor(), image_grid_pinpoints=...),
            small,
            image_grid_pinpoints=...,
        ),
        "type_clip": model(image_processor(image_processor_type="CLIPImageProcessor"), small),
    }


class _TokenCounter(LlavaNextProcessingInfo):
    """Computes the number of tokens of an image from a config alone."""

    def __init__(self, settings: dict) -> None:
        self._config = LlavaNextConfig(
            **{key: value for key, value in settings.items() if key != "architectures"}
        )

    def get_hf_config(self):
        return self._config


def plans() -> tuple[list[str], list[list]]:
    """Returns plans of random sizes, some of them near the grids' aspect ratios."""
    rng = random.Random("plans of llava_next")
    granite = config(
        image_grid_pinpoints=GRANITE_PINPOINTS,
        vision=GRANITE_VISION,
        vision_feature_select_strategy="full",
    )
    counters = {"v1_6_mistral": _TokenCounter(config()), "granite_vision": _TokenCounter(granite)}
    rows = []
    for number in range(1000):
        model = "v1_6_mistral" if number % 2 else "granite_vision"
        pinpoints = PINPOINTS if number % 2 else GRANITE_PINPOINTS
        width, height = (max(1, round(2 ** rng.uniform(0, 12.5))) for _ in range(2))
        if rng.random() < 0.3:
            height, width = (side // rng.choice([1, 2, 3, 6]) for side in rng.choice(pinpoints))
            width, height = width + rng.choice([-1, 0, 0, 1]), height + rng.choice([-1, 0, 0, 1])
        # Never None: if no pixel of the image is left on any grid, the first grid is returned.
        best = select_best_resolution((height, width), pinpoints)
        image = _image_without_memory(height, width)
        new_height, new_width = get_patch_output_size(image, best, "channels_first")
        tokens = counters[model].get_num_image_tokens(image_width=width, image_height=height)
        rows.append([model, width, height, tokens, best[1], best[0], new_width, new_height])
    columns = [
        "model",
        "width",
        "height",
        "tokens",
        "grid_width",
        "grid_height",
        "resized_width",
        "resized_height",
    ]
    return columns, rows


def _image_without_memory(height: int, width: int) -> np.ndarray:
    """Returns an image that takes no memory; get_patch_output_size only reads its shape."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


def engine_accepts(settings: dict, size, case: dict) -> bool:
    """Returns True if the item has the vision tower's size and the tiles of the config's grid.

    LlavaNextImagePixelInputs requires the size, the model the number of tiles.
    """
    side = settings["vision_config"]["image_size"]
    config = LlavaNextConfig(image_grid_pinpoints=settings.get("image_grid_pinpoints"))
    rows, columns = get_anyres_image_grid_shape(
        (size[1], size[0]), config.image_grid_pinpoints, side
    )
    return case["tensors"]["pixel_values"]["shape"] == [1 + rows * columns, 3, side, side]


FAMILY = Family(prompt="<image>", models=models(), engine_accepts=engine_accepts, plans=plans)
