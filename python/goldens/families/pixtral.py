"""Pixtral in the Hugging Face format: any size, aligned to patches.

The config has model_type llava and a pixtral vision_config.
"""

import random

import torch
from transformers import LlavaConfig
from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size
from vllm.model_executor.models.pixtral import PixtralHFEncoderInfo

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
VOCABULARY = {
    "<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4, "[IMG]": 10, "<pad>": 11,
    "[IMG_BREAK]": 12,
    "[IMG_END]": 13,
}  # fmt: skip


def config(**changes) -> dict:
    """Returns the image settings in config.json of mistral-community/pixtral-12b, with changes."""
    vision = {
        "head_dim": 64,
        "hidden_size": 1024,
        "image_size": 1024,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 16,
        "rope_theta": 10000.0,
    }
    settings = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_seq_length": 1,
        "image_token_index": 10,
        "model_type": "llava",
        "text_config": {
            "model_type": "mistral",
            "vocab_size": 131072,
            "max_position_embeddings": 32768,
        },
        "vision_config": with_changes(vision, **changes.pop("vision", {})),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    return with_changes(settings, **changes)


def image_processor(**changes) -> dict:
    """Returns preprocessor_config.json of pixtral-12b, with changes."""
    settings = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": llava.CLIP_MEAN,
        "image_processor_type": "PixtralImageProcessor",
        "image_std": llava.CLIP_STD,
        "patch_size": {"height": 16, "width": 16},
        "processor_class": "PixtralProcessor",
        "resample": 3,
        "rescale_factor": llava.RESCALE,
        "size": {"longest_edge": 1024},
    }
    return with_changes(settings, **changes)


def processor(**changes) -> dict:
    settings = {
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
        "image_token": "[IMG]",
        "patch_size": 16,
        "processor_class": "PixtralProcessor",
    }
    return with_changes(settings, **changes)


# Multiples of the patch and their neighbours, and sizes around the longest edge.
MAIN_SIZES = with_random_sizes("pixtral") + [
    (16, 16), (15, 17), (32, 31), (1024, 1024), (1025, 1024), (1023, 1025), (1040, 16), (5, 1399),
    (1, 1024), (1, 1025),
    (3000, 2),
]  # fmt: skip
KWARGS = [
    {"size": {"longest_edge": 512}},
    {"size": {"longest_edge": 2000}},
    {"size": {"height": 300, "width": 200}},
    {"size": 512},
    {"patch_size": 32},
    {"resample": 2},
    {"do_resize": False},
    {"do_pad": False},
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
    small = without_kwargs([(61, 83), (500, 337), (1301, 700)])
    kwargs = [(size, kwargs) for kwargs in KWARGS for size in [(61, 83), (700, 337)]]
    return {
        "pixtral_12b": model(image_processor(), without_kwargs(MAIN_SIZES) + kwargs, full=True),
        "new_file": Model(nested, VOCABULARY, small),
        "fast": model(image_processor(image_processor_type="PixtralImageProcessorFast"), small),
        "defaults": model(
            {"image_processor_type": "PixtralImageProcessor"}, small, processor_file=None
        ),
        # The processor's patch_size takes precedence over the image processor's.
        "patch_size_in_old_file_only": model(
            image_processor(patch_size=14),
            small,
            processor_file=processor(patch_size=...),
            vision={"patch_size": 14},
        ),
        "patch_14": model(
            image_processor(patch_size=16),
            small,
            processor_file=processor(patch_size=14),
            vision={"patch_size": 14},
        ),
        "smaller_edge": model(image_processor(size={"longest_edge": 500}), small),
        "smaller_edge_and_tower": model(
            image_processor(size={"longest_edge": 500}), small, vision={"image_size": 500}
        ),
        "height_and_width": model(image_processor(size={"height": 1024, "width": 1024}), small),
        "bilinear": model(image_processor(resample=2), small),
        "lanczos": model(image_processor(resample=1), small),
        "no_resize": model(image_processor(do_resize=False), without_kwargs([(64, 48), (61, 83)])),
        "no_pad": model(image_processor(do_pad=False), small),
        "no_normalize": model(image_processor(do_normalize=False), small),
        "no_processor_class": model(
            image_processor(processor_class=...), small, processor_file=None
        ),
    }


def plan_rows(seed: str, edges: list[int], patches: list[int], count_tokens) -> list[list]:
    """Returns rows of COLUMNS for random images."""
    rng = random.Random(seed)
    rows = []
    for _ in range(800):
        edge = rng.choice(edges)
        patch = rng.choice(patches)
        width, height = (max(1, round(2 ** rng.uniform(0, 13))) for _ in range(2))
        if rng.random() < 0.4:  # the scaled side is a whole number or a multiple of the patch
            width = edge * rng.randint(1, 6) // rng.choice([1, 2, 3, 5]) + rng.choice([0, 0, 0, 1])
            height = patch * rng.randint(1, 60) * rng.choice([1, 2, 3]) + rng.choice([-1, 0, 0, 1])
            width, height = rng.sample([max(1, width), height], 2)
        image = torch.empty((), dtype=torch.uint8).expand(3, height, width)
        try:
            new_height, new_width = get_resize_output_image_size(
                image, (edge, edge), (patch, patch)
            )
        except ZeroDivisionError:
            continue
        columns, lines = count_tokens(edge, patch, width, height)
        rows.append([edge, patch, width, height, new_width, new_height, columns, lines])
    return rows


COLUMNS = [
    "longest_edge",
    "patch_size",
    "width",
    "height",
    "resized_width",
    "resized_height",
    "tokens_x",
    "tokens_y",
]


def plans() -> tuple[list[str], list[list]]:
    def count_tokens(edge: int, patch: int, width: int, height: int) -> tuple[int, int]:
        settings = config(vision={"image_size": edge, "patch_size": patch})
        info = PixtralHFEncoderInfo(LlavaConfig(vision_config=settings["vision_config"]))
        return info.get_patch_grid_size(image_width=width, image_height=height)

    return COLUMNS, plan_rows("plans of pixtral", [1024, 1024, 500], [16, 16, 14], count_tokens)


def engine_accepts(settings: dict, _size, case: dict) -> bool:
    """Returns True if there is one embedding per patch of the vision tower.

    With mistral3 there must be one per merged patch.
    """
    patch = settings["vision_config"]["patch_size"]
    merge = settings.get("spatial_merge_size", 1)
    _, height, width = case["tensors"]["pixel_values"]["shape"]
    embeddings = sum(count for _, count, embeds in case["placeholder"] if embeds)
    return embeddings == (height // patch // merge) * (width // patch // merge)


FAMILY = Family(prompt="[IMG]", models=models(), engine_accepts=engine_accepts, plans=plans)
