"""Gemma 3: one square image, and crops of long images if "pan and scan" is on."""

import random

import torch
from transformers import Gemma3ImageProcessor

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
LINE_BREAKS = {"\n": 107, "\n\n": 108, "\n\n\n": 109, "\n\n\n\n": 110}
VOCABULARY = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<start_of_turn>": 105, "<end_of_turn>": 106, **LINE_BREAKS,
    "<start_of_image>": 255999, "<end_of_image>": 256000, "<image_soft_token>": 262144,
}  # fmt: skip
TOKENIZER = {
    "extra_special_tokens": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
}
PLACEHOLDER_TEXTS = (
    "Here is the original image ",
    " and here are some crops to help you see better ",
    " ",
)


def config(**changes) -> dict:
    """Returns the image settings in config.json of gemma-3-4b-it, with changes."""
    vision = {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    }
    settings = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "vocab_size": 262208},
        "vision_config": with_changes(vision, **changes.pop("vision", {})),
    }
    return with_changes(settings, **changes)


def image_processor(**changes) -> dict:
    """Returns preprocessor_config.json of gemma-3-4b-it, with changes."""
    settings = {
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": 256,
        "image_std": [0.5, 0.5, 0.5],
        "pan_and_scan_max_num_crops": None,
        "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None,
        "processor_class": "Gemma3Processor",
        "resample": 2,
        "rescale_factor": llava.RESCALE,
        "size": {"height": 896, "width": 896},
    }
    return with_changes(settings, **changes)


def processor(**changes) -> dict:
    return with_changes({"image_seq_length": 256, "processor_class": "Gemma3Processor"}, **changes)


# The ratios at which crops begin, and ratios halfway between two counts of crops.
CROPPED_SIZES = [
    (640, 480), (600, 500), (599, 500), (512, 256), (511, 255), (768, 300), (1280, 512),
    (1920, 1080), (1080, 1920),
    (256, 1000), (257, 1300), (2000, 301), (1023, 341), (300, 300), (61, 83),
]  # fmt: skip
PAN_AND_SCAN = {"do_pan_and_scan": True}
KWARGS = [
    PAN_AND_SCAN | {"pan_and_scan_min_crop_size": 100},
    PAN_AND_SCAN | {"pan_and_scan_max_num_crops": 2},
    PAN_AND_SCAN | {"pan_and_scan_max_num_crops": 1},
    PAN_AND_SCAN | {"pan_and_scan_min_ratio_to_activate": 2.0},
    PAN_AND_SCAN | {"pan_and_scan_min_crop_size": 1, "pan_and_scan_max_num_crops": 7},
    {"do_pan_and_scan": False},
    {"size": {"height": 448, "width": 448}},
    {"resample": 3},
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
        return Model(
            files, VOCABULARY, trials, tuple(LINE_BREAKS), (), TOKENIZER, PLACEHOLDER_TEXTS, full
        )

    nested = {
        PROCESSOR: processor(image_processor=image_processor(processor_class=...)),
        "config.json": config(),
    }
    small = without_kwargs([(61, 83), (500, 337), (301, 700)])
    crops = {
        "do_pan_and_scan": True,
        "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_crop_size": 128,
        "pan_and_scan_min_ratio_to_activate": 1.5,
    }
    on_kwargs = [(size, PAN_AND_SCAN) for size in CROPPED_SIZES]
    more_kwargs = [(size, kwargs) for kwargs in KWARGS for size in [(1000, 250), (500, 337)]]
    # The last crops begin beyond the image.
    more_kwargs.append(
        ((9, 1), PAN_AND_SCAN | {"pan_and_scan_min_crop_size": 1, "pan_and_scan_max_num_crops": 7})
    )
    return {
        "gemma_3_4b": model(
            image_processor(),
            without_kwargs(with_random_sizes("gemma3")) + on_kwargs + more_kwargs,
            full=True,
        ),
        "new_file": Model(
            nested, VOCABULARY, small, tuple(LINE_BREAKS), (), TOKENIZER, PLACEHOLDER_TEXTS
        ),
        "fast": model(image_processor(image_processor_type="Gemma3ImageProcessorFast"), small),
        "defaults": model(
            {"image_processor_type": "Gemma3ImageProcessor"},
            processor_file=None,
            vision={"image_size": 224},
        ),
        # The processor's own default (off) takes precedence over the file. vLLM and transformers
        # disagree about this setting.
        "pan_and_scan": model(
            image_processor(**crops),
            without_kwargs([(61, 83), (500, 337), (1000, 250), (301, 700)]),
        ),
        "bicubic": model(image_processor(resample=3), small),
        "lanczos": model(image_processor(resample=1), small),
        "shorter_sequence": model(
            image_processor(), small, processor_file=processor(image_seq_length=64)
        ),
        "sequence_in_old_file_only": model(
            image_processor(image_seq_length=64), small, processor_file=None
        ),
        "no_resize": model(
            image_processor(do_resize=False), without_kwargs([(896, 896), (500, 337)])
        ),
        "no_normalize": model(image_processor(do_normalize=False), small),
        "shortest_edge": model(
            image_processor(size={"shortest_edge": 896}), without_kwargs([(61, 83), (300, 300)])
        ),
        "integer_size": model(image_processor(size=896), small),
        "siglip_processor": model(
            image_processor(image_processor_type="SiglipImageProcessor"), small
        ),
    }


def plans() -> tuple[list[str], list[list]]:
    """Returns the crops that the processor cuts; [] if there are none."""
    processor = Gemma3ImageProcessor()
    rng = random.Random("plans of gemma3")
    rows = []
    for _ in range(1000):
        width, height = (max(1, round(2 ** rng.uniform(6, 12.5))) for _ in range(2))
        min_crop_size, max_crops, ratio = rng.choice(
            [(256, 4, 1.2)] * 4
            + [(100, 4, 1.2), (1, 7, 1.0), (64, 1, 1.5), (256, 2, 2.0), (17, 12, 1.0)]
        )
        if rng.random() < 0.4:  # halves of the ratio, and sizes one pixel off
            width = round(height * rng.choice([1.2, 1.5, 2.5, 3.5, 2, 3, 4])) + rng.choice(
                [-1, 0, 0, 1]
            )
            width, height = rng.sample([max(1, width), height], 2)
        image = torch.empty((), dtype=torch.uint8).expand(1, 3, height, width)
        crops = processor.pan_and_scan_batched(image, min_crop_size, max_crops, ratio)
        sizes = [list(crop.shape[:1:-1]) for crop in crops]
        rows.append([width, height, min_crop_size, max_crops, ratio, sizes])
    columns = [
        "width",
        "height",
        "min_crop_size",
        "max_num_crops",
        "min_ratio_to_activate",
        "crops",
    ]
    return columns, rows


def engine_accepts(settings: dict, _size, case: dict) -> bool:
    """Returns True if the item has the vision tower's size and the right number of embeddings.

    Gemma3ImagePixelInputs takes no other size. Every crop becomes mm_tokens_per_image embeddings.
    """
    side = settings["vision_config"]["image_size"]
    shape = case["tensors"]["pixel_values"]["shape"]
    embeddings = sum(count for _, count, embeds in case["placeholder"] if embeds)
    return shape[-2:] == [side, side] and embeddings == shape[0] * settings["mm_tokens_per_image"]


PROMPTS = [
    ("gemma_3_4b", text, sizes, kwargs)
    for text, sizes, kwargs in [
        ("<bos><start_of_turn>user\n<start_of_image>what is this?<end_of_turn>\n", [(30, 40)], {}),
        ("a\n<start_of_image>\nb", [(30, 40)], {}),
        ("a\n\n<start_of_image>\n\nb", [(30, 40)], {}),
        ("a\n\n\n<start_of_image>\n\n\nb", [(30, 40)], {}),
        ("a\n\n\n\n<start_of_image>\n\n\n\nb", [(30, 40)], {}),
        ("<start_of_image><start_of_image>b", [(30, 40), (50, 60)], {}),
        ("<start_of_image>\n<start_of_image>b", [(30, 40), (50, 60)], {}),
        ("<start_of_image>\n\n<start_of_image>\n", [(30, 40), (50, 60)], {}),
        ("<start_of_image> <start_of_image><start_of_image>", [(30, 40), (50, 60), (70, 80)], {}),
        ("a\n\n\n\nb<start_of_image>c\n\n\nd", [(30, 40)], {}),
        ("x\n<start_of_image>\ny", [(1000, 300)], PAN_AND_SCAN),
        ("x\n<start_of_image><start_of_image>\ny", [(1000, 300), (300, 300)], PAN_AND_SCAN),
    ]
]

FAMILY = Family(
    prompt="<start_of_image>",
    models=models(),
    engine_accepts=engine_accepts,
    plans=plans,
    prompts=PROMPTS,
)
