"""Mistral 3: Pixtral's image processor, with patches merged two by two.

vLLM takes bytes and normalizes them on the device.
"""

from transformers import Mistral3Config
from vllm.model_executor.models.mistral3 import Mistral3HFEncoderInfo

from families import llava, pixtral
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


def config(**changes) -> dict:
    """Returns the image settings in Mistral-Small-3.1-24B-Instruct-2503's config.json, changed."""
    vision = {"image_size": 1540, "patch_size": 14} | changes.pop("vision", {})
    settings = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_seq_length": ...,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_select_strategy": ...,
    }
    return with_changes(pixtral.config(vision=vision), **(settings | changes))


def image_processor(**changes) -> dict:
    """Returns preprocessor_config.json of Mistral-Small-3.1-24B-Instruct-2503, with changes."""
    settings = {
        "image_processor_type": "PixtralImageProcessorFast",
        "patch_size": 14,
        "size": {"longest_edge": 1540},
    }
    return pixtral.image_processor(**(settings | changes))


def processor(**changes) -> dict:
    return pixtral.processor(**({"patch_size": 14, "spatial_merge_size": 2} | changes))


MAIN_SIZES = with_random_sizes("mistral3") + [
    (28, 28), (27, 29), (56, 55), (1540, 1540), (1541, 1540), (1539, 1541), (1568, 28), (5, 1399),
    (1, 1540), (1, 1541),
    (4000, 2),
]  # fmt: skip
KWARGS = [
    {"size": {"longest_edge": 700}},
    {"size": {"longest_edge": 2000}},
    {"size": {"height": 300, "width": 200}},
    {"size": 512},
    {"images_kwargs": {"size": {"longest_edge": 280}}},
    {"patch_size": 32},
    {"resample": 2},
    {"do_resize": False},
    {"do_normalize": True},
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
        return Model(files, pixtral.VOCABULARY, trials, full=full)

    nested = {
        PROCESSOR: processor(image_processor=image_processor(processor_class=...)),
        "config.json": config(),
    }
    small = without_kwargs([(61, 83), (500, 337), (1801, 700)])
    kwargs = [(size, kwargs) for kwargs in KWARGS for size in [(61, 83), (700, 337)]]
    return {
        "mistral_small_3_1": model(
            image_processor(), without_kwargs(MAIN_SIZES) + kwargs, full=True
        ),
        "new_file": Model(nested, pixtral.VOCABULARY, small),
        "not_fast": model(image_processor(image_processor_type="PixtralImageProcessor"), small),
        "defaults": model(
            {"image_processor_type": "PixtralImageProcessor"}, small, processor_file=None
        ),
        "merge_in_config_only": model(
            image_processor(), small, processor_file=processor(spatial_merge_size=...)
        ),
        "smaller_edge": model(image_processor(size={"longest_edge": 500}), small),
        "height_and_width": model(image_processor(size={"height": 1540, "width": 1540}), small),
        "bilinear": model(image_processor(resample=2), small),
        "no_resize": model(image_processor(do_resize=False), without_kwargs([(56, 84), (61, 83)])),
        "no_normalize": model(image_processor(do_normalize=False), small),
    }


def plans() -> tuple[list[str], list[list]]:
    """Returns plans in merged patches: 28 pixels for tower patches of 14."""

    def count_tokens(edge: int, patch: int, width: int, height: int) -> tuple[int, int]:
        settings = config(vision={"patch_size": patch // 2})
        hf_config = Mistral3Config(vision_config=settings["vision_config"], spatial_merge_size=2)
        info = Mistral3HFEncoderInfo(hf_config, edge)
        return info.get_patch_grid_size(image_width=width, image_height=height)

    return pixtral.COLUMNS, pixtral.plan_rows(
        "plans of mistral3", [1540, 1540, 500], [28, 28, 32], count_tokens
    )


FAMILY = Family(prompt="[IMG]", models=models(), engine_accepts=pixtral.engine_accepts, plans=plans)
