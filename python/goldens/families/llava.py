"""LLaVA-1.5: CLIP's or SigLIP's image processor, and a fixed number of tokens."""

from families.family import (
    FEW_SIZES,
    Family,
    Model,
    with_changes,
    without_kwargs,
    with_random_sizes,
)

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
RESCALE = 0.00392156862745098


def config(**changes) -> dict:
    """Returns the image settings in config.json of llava-1.5-7b-hf, with changes."""
    vision = {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
    }
    settings = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 32000,
        "model_type": "llava",
        "text_config": {
            "model_type": "llama",
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
        },
        "vision_config": with_changes(vision, **changes.pop("vision", {})),
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    return with_changes(settings, **changes)


def image_processor(**changes) -> dict:
    """Returns preprocessor_config.json of llava-1.5-7b-hf, with changes."""
    settings = {
        "crop_size": {"height": 336, "width": 336},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": CLIP_MEAN,
        "image_processor_type": "CLIPImageProcessor",
        "image_std": CLIP_STD,
        "processor_class": "LlavaProcessor",
        "resample": 3,
        "rescale_factor": RESCALE,
        "size": {"shortest_edge": 336},
    }
    return with_changes(settings, **changes)


def processor(**changes) -> dict:
    settings = {
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "patch_size": 14,
        "processor_class": "LlavaProcessor",
        "vision_feature_select_strategy": "default",
    }
    return with_changes(settings, **changes)


VOCABULARY = {"<s>": 1, "</s>": 2, "<image>": 32000, "<pad>": 32001}
SIGLIP = {
    "image_size": 384,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
}

# The usual sizes, and sizes whose crop has a fractional offset of one half in either direction.
MAIN_SIZES = with_random_sizes("llava") + [
    (337, 336),
    (336, 339),
    (1007, 672),
    (672, 1009),
    (5, 7),
    (13, 9),
]
KWARGS = [
    {"size": {"shortest_edge": 400}},
    {"size": {"height": 200, "width": 360}},
    {"size": 350},
    {"crop_size": {"height": 224, "width": 336}},
    {"crop_size": 300},
    {"do_center_crop": False},
    {"do_resize": False},
    {"resample": 2},
    {"do_pad": True},
    {"size": {"longest_edge": 400}},
    {"size": {"shortest_edge": 300, "longest_edge": 400}},
    {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    {"do_normalize": False},
    {"do_rescale": False},
    {"rescale_factor": 0.01},
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
    llava_type = {"image_processor_type": "LlavaImageProcessor"}
    siglip = {
        "image_processor_type": "SiglipImageProcessor",
        "crop_size": ...,
        "do_center_crop": ...,
    }
    kwargs = [(size, kwargs) for kwargs in KWARGS for size in [(61, 83), (500, 337)]]
    return {
        "llava_1_5": model(image_processor(), without_kwargs(MAIN_SIZES) + kwargs, full=True),
        "new_file": Model(nested, VOCABULARY, without_kwargs(FEW_SIZES)),
        "fast": model(image_processor(image_processor_type="CLIPImageProcessorFast")),
        "llava_processor": model(image_processor(**llava_type)),
        # pad_to_square with the mean as background, then a resize.
        "do_pad": model(image_processor(**llava_type, do_pad=True)),
        "defaults": model(
            {"image_processor_type": "CLIPImageProcessor"},
            vision={"image_size": 224},
            processor_file=None,
        ),
        "defaults_llava_processor": model(
            {"image_processor_type": "LlavaImageProcessor"},
            vision={"image_size": 224},
            processor_file=None,
        ),
        "bilinear": model(image_processor(resample=2)),
        "lanczos": model(image_processor(resample=1)),
        "nearest": model(image_processor(resample=0), without_kwargs([(61, 83), (500, 337)])),
        "box": model(image_processor(resample=4), without_kwargs([(61, 83), (500, 337)])),
        "hamming": model(image_processor(resample=5), without_kwargs([(61, 83), (500, 337)])),
        "no_center_crop": model(image_processor(do_center_crop=False)),
        "square_size": model(
            image_processor(size={"height": 336, "width": 336}, do_center_crop=False)
        ),
        "integer_sizes": model(image_processor(size=336, crop_size=336)),
        "crop_larger_than_size": model(image_processor(size={"shortest_edge": 200})),
        "crop_smaller_than_size": model(image_processor(size={"shortest_edge": 401})),
        "no_resize": model(image_processor(do_resize=False)),
        "no_normalize": model(image_processor(do_normalize=False)),
        "no_rescale": model(image_processor(do_rescale=False)),
        "no_rescale_no_normalize": model(image_processor(do_rescale=False, do_normalize=False)),
        "size_without_edge": model(
            image_processor(size={"longest_edge": 336}), without_kwargs([(61, 83)])
        ),
        "nulls": model(
            image_processor(
                do_center_crop=None, size=None, crop_size=None, image_mean=None, resample=None
            ),
            without_kwargs([(61, 83), (500, 337)]),
        ),
        "null_resample": model(
            image_processor(resample=None), without_kwargs([(61, 83), (500, 337)])
        ),
        "null_size": model(image_processor(size=None), without_kwargs([(61, 83), (500, 337)])),
        "null_crop_size": model(
            image_processor(crop_size=None), without_kwargs([(61, 83), (500, 337)])
        ),
        "null_do_center_crop": model(
            image_processor(do_center_crop=None), without_kwargs([(61, 83), (500, 500)])
        ),
        "strategy_full": model(
            image_processor(), without_kwargs([(61, 83)]), vision_feature_select_strategy="full"
        ),
        "strategy_class": model(
            image_processor(), without_kwargs([(61, 83)]), vision_feature_select_strategy="class"
        ),
        "siglip": model(
            image_processor(
                **siglip,
                size={"height": 384, "width": 384},
                image_mean=[0.5] * 3,
                image_std=[0.5] * 3,
            ),
            vision=SIGLIP,
            vision_feature_select_strategy="full",
        ),
        "siglip_defaults": model(
            {"image_processor_type": "SiglipImageProcessor"},
            vision=SIGLIP | {"image_size": 224},
            vision_feature_select_strategy="full",
        ),
        "type_missing": model(image_processor(image_processor_type=...)),
        "type_unknown": model(image_processor(image_processor_type="NoSuchImageProcessor")),
        "no_processor_files": Model(
            {"config.json": config()}, VOCABULARY, without_kwargs(FEW_SIZES)
        ),
    }


def engine_accepts(settings: dict, _size, case: dict) -> bool:
    """Returns True if the item has the vision tower's size, as LlavaImagePixelInputs requires."""
    side = settings["vision_config"]["image_size"]
    return case["tensors"]["pixel_values"]["shape"][-2:] == [side, side]


FAMILY = Family(prompt="<image>", models=models(), engine_accepts=engine_accepts)
