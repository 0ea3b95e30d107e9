"""Other models with Qwen2-VL's image processor.

These are Cosmos-Reason1 and 2, Qwen3-VL MoE, and Qwen3.5 (and 3.6).
"""

from families import llava
from families.family import Family, Model, with_changes, without_kwargs

PREPROCESSOR = llava.PREPROCESSOR
# The token ids of Qwen2's vocabulary and of Qwen3.5's.
OLD_IDS = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653, "<|vision_pad|>": 151654, "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}  # fmt: skip
NEW_IDS = {
    "<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046,
    "<|vision_start|>": 248053,
    "<|vision_end|>": 248054, "<|vision_pad|>": 248055, "<|image_pad|>": 248056,
    "<|video_pad|>": 248057,
}  # fmt: skip


def config(model_type: str, architecture: str, ids: dict[str, int], patch: int = 16) -> dict:
    """Returns the image settings in config.json."""
    return {
        "architectures": [architecture],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": model_type,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {"patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2},
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def old_image_processor(**changes) -> dict:
    """Returns preprocessor_config.json of Cosmos-Reason1-7B and Qwen2.5-VL, with changes."""
    settings = {
        "image_mean": llava.CLIP_MEAN,
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": llava.CLIP_STD,
        "max_pixels": 12845056,
        "merge_size": 2,
        "min_pixels": 3136,
        "patch_size": 14,
        "processor_class": "Qwen2_5_VLProcessor",
        "temporal_patch_size": 2,
    }
    return with_changes(settings, **changes)


def image_processor(**changes) -> dict:
    """Returns preprocessor_config.json of Qwen3-VL and later models, with changes."""
    settings = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "temporal_patch_size": 2,
    }
    return with_changes(settings, **changes)


SIZES = [
    (1, 1),
    (3, 600),
    (1, 201),
    (48, 72),
    (61, 83),
    (255, 257),
    (500, 337),
    (1001, 503),
    (1920, 1080),
    (20, 4000),
]
KWARGS = [
    {"min_pixels": 200000},
    {"max_pixels": 20000},
    {"size": {"shortest_edge": 784, "longest_edge": 50000}},
]


def models() -> dict[str, Model]:
    small = without_kwargs([(61, 83), (500, 337)])

    def model(
        settings: dict, preprocessor: dict, ids: dict[str, int], video: str, trials=small
    ) -> Model:
        video_file = {
            "processor_class": preprocessor["processor_class"],
            "video_processor_type": video,
        }
        files = {
            "config.json": settings,
            PREPROCESSOR: preprocessor,
            "video_preprocessor_config.json": video_file,
        }
        return Model(files, ids, trials, full=True)

    trials = without_kwargs(SIZES) + [((500, 337), kwargs) for kwargs in KWARGS]
    moe = config("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", OLD_IDS)
    three = config("qwen3_vl", "Qwen3VLForConditionalGeneration", OLD_IDS)
    five = config("qwen3_5", "Qwen3_5ForConditionalGeneration", NEW_IDS)
    five_moe = config("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", NEW_IDS)
    two_five = config("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", OLD_IDS, 14)
    old_video = "Qwen2VLVideoProcessor"
    video = "Qwen3VLVideoProcessor"
    no_type = image_processor(image_processor_type=...)
    return {
        "cosmos_reason1_7b": model(two_five, old_image_processor(), OLD_IDS, old_video, trials),
        "cosmos_reason2_8b": model(three, image_processor(), OLD_IDS, video),
        "qwen3_vl_30b_a3b": model(moe, image_processor(), OLD_IDS, video, trials),
        "qwen3_5_27b": model(five, image_processor(), NEW_IDS, video, trials),
        "qwen3_5_35b_a3b": model(five_moe, image_processor(), NEW_IDS, video, trials),
        "qwen3_vl_moe_no_type": model(moe, no_type, OLD_IDS, video),
        "qwen3_5_no_type": model(five, no_type, NEW_IDS, video),
        "qwen3_5_moe_no_type": model(five_moe, no_type, NEW_IDS, video),
    }


def engine_accepts(_settings: dict, _size, case: dict) -> bool:
    """Returns True if there is one embedding per four patches."""
    embeddings = sum(count for _, count, embeds in case["placeholder"] if embeds)
    return embeddings * 4 == case["tensors"]["pixel_values"]["shape"][0]


FAMILY = Family(
    prompt="<|vision_start|><|image_pad|><|vision_end|>",
    models=models(),
    engine_accepts=engine_accepts,
)
