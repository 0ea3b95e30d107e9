"""The model directories and engine flags of the goldens of videos."""

from dataclasses import dataclass, field

from families import llava
from families.family import with_changes
from families.qwen_more import NEW_IDS, OLD_IDS, config, image_processor, old_image_processor

ONEVISION_IDS = {"<|endoftext|>": 151643, "<image>": 151646, "<video>": 151647}
NEXT_IDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<video>": 32000, "<image>": 32001}
VIDEO_FILE = "video_preprocessor_config.json"


@dataclass(frozen=True)
class Variant:
    """A model directory and an engine's flags."""

    family: str
    # File name → JSON.
    files: dict[str, dict]
    # The special tokens of its tokenizer.
    vocabulary: dict[str, int]
    # Arguments of vLLM's ModelConfig.
    flags: dict = field(default_factory=dict)
    # `video` of --media-io-kwargs.
    media_io: dict = field(default_factory=dict)


def qwen(family: str, architecture: str, ids: dict, image: dict, video: dict | None) -> dict:
    """Returns the files of a Qwen-VL model."""
    patch = image["patch_size"]
    files = {
        "config.json": config(family, architecture, ids, patch),
        "preprocessor_config.json": image,
    }
    return files if video is None else files | {VIDEO_FILE: video}


def three_video(**changes) -> dict:
    """Returns video_preprocessor_config.json of Qwen3-VL, with changes."""
    settings = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "do_sample_frames": True,
        "fps": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_frames": 768,
        "merge_size": 2,
        "min_frames": 4,
        "patch_size": 16,
        "processor_class": "Qwen3VLProcessor",
        "resample": 3,
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        "temporal_patch_size": 2,
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    return with_changes(settings, **changes)


def two_video(**changes) -> dict:
    """Returns video_preprocessor_config.json of a Qwen2-VL model saved by `transformers`."""
    settings = {
        "image_mean": llava.CLIP_MEAN,
        "image_std": llava.CLIP_STD,
        "merge_size": 2,
        "patch_size": 14,
        "processor_class": "Qwen2_5_VLProcessor",
        "size": {"longest_edge": 602112, "shortest_edge": 100352},
        "temporal_patch_size": 2,
        "video_processor_type": "Qwen2VLVideoProcessor",
    }
    return with_changes(settings, **changes)


def llava_video(
    family: str, architecture: str, token: int, tower: dict, size: dict, **changes
) -> dict:
    """Returns the files of a LLaVA model with videos."""
    name = {"llava_onevision": "LlavaOnevision", "llava_next_video": "LlavaNextVideo"}[family]
    settings = llava.config(
        architectures=[architecture],
        model_type=family,
        image_token_index=token - 1 if family == "llava_onevision" else 32001,
        video_token_index=token,
        vision=tower,
    )
    processor = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": llava.CLIP_MEAN,
        "image_std": llava.CLIP_STD,
        "processor_class": f"{name}Processor",
        "resample": 3,
        "size": size,
        "video_processor_type": f"{name}VideoProcessor",
    } | changes
    image = {
        "image_grid_pinpoints": [[336, 672], [672, 336]],
        "image_processor_type": "LlavaOnevisionImageProcessor"
        if family == "llava_onevision"
        else "LlavaNextVideoImageProcessor",
        "processor_class": f"{name}Processor",
    }
    if family == "llava_next_video":
        image = {"image_processor_type": "LlavaNextImageProcessor"} | image
        image["image_processor_type"] = "LlavaNextImageProcessor"
    return {
        "config.json": settings,
        "preprocessor_config.json": image,
        "processor_config.json": {
            "processor_class": f"{name}Processor",
            "num_image_tokens": 729,
            "patch_size": 14,
            "vision_feature_select_strategy": settings["vision_feature_select_strategy"],
        },
        VIDEO_FILE: processor,
    }


def variants() -> dict[str, Variant]:
    two = "Qwen2VLForConditionalGeneration"
    two_five = "Qwen2_5_VLForConditionalGeneration"
    three = "Qwen3VLForConditionalGeneration"
    five = "Qwen3_5ForConditionalGeneration"
    two_image = old_image_processor(processor_class="Qwen2VLProcessor")
    two_files = qwen("qwen2_vl", two, OLD_IDS, two_image, None)
    two_five_files = qwen("qwen2_5_vl", two_five, OLD_IDS, old_image_processor(), None)
    three_files = qwen("qwen3_vl", three, OLD_IDS, image_processor(), three_video())
    five_files = qwen("qwen3_5", five, NEW_IDS, image_processor(), three_video())
    nested = {
        "processor_config.json": {
            "image_processor": image_processor(),
            "processor_class": "Qwen3VLProcessor",
            "video_processor": three_video(size={"longest_edge": 900000, "shortest_edge": 4096}),
        }
    }
    siglip = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    square = {"height": 384, "width": 384}
    onevision = llava_video(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        151647,
        siglip,
        square,
    )
    next_video = llava_video(
        "llava_next_video",
        "LlavaNextVideoForConditionalGeneration",
        32000,
        {},
        {"shortest_edge": 336},
        crop_size={"height": 336, "width": 336},
        do_center_crop=True,
    )
    evs = {"video_pruning_rate": 0.75}
    vidcom2 = {"video_pruning_rate": 0.6, "video_pruning_method": "vidcom2"}
    return {
        "qwen2_vl": Variant("qwen2", two_files, OLD_IDS),
        "qwen2_vl_loader_flags": Variant(
            "qwen2", two_files, OLD_IDS, media_io={"fps": 4, "num_frames": 16}
        ),
        "cosmos_reason1": Variant("qwen2", two_five_files, OLD_IDS),
        "qwen2_5_vl_new_file": Variant(
            "qwen2",
            qwen("qwen2_5_vl", two_five, OLD_IDS, old_image_processor(), two_video()),
            OLD_IDS,
        ),
        "qwen2_5_vl_capped": Variant(
            "qwen2",
            qwen(
                "qwen2_5_vl",
                two_five,
                OLD_IDS,
                old_image_processor(),
                two_video(cap_pixels_per_frame=True, max_video_tokens=4000),
            ),
            OLD_IDS,
        ),
        "qwen2_5_vl_evs": Variant("qwen2", two_five_files, OLD_IDS, evs),
        "qwen2_5_vl_kwargs": Variant(
            "qwen2",
            two_five_files,
            OLD_IDS,
            {"mm_processor_kwargs": {"min_pixels": 40000, "max_pixels": 90000}},
        ),
        "qwen3_vl": Variant("qwen3", three_files, OLD_IDS),
        "qwen3_vl_loader_flags": Variant(
            "qwen3", three_files, OLD_IDS, media_io={"fps": 8, "max_frames": 40}
        ),
        "qwen3_vl_default_size": Variant(
            "qwen3",
            qwen("qwen3_vl", three, OLD_IDS, image_processor(), three_video(size=..., fps=...)),
            OLD_IDS,
        ),
        "qwen3_vl_capped": Variant(
            "qwen3",
            qwen(
                "qwen3_vl",
                three,
                OLD_IDS,
                image_processor(),
                three_video(cap_pixels_per_frame=True, max_video_tokens=100, fps=4, max_frames=50),
            ),
            OLD_IDS,
        ),
        "qwen3_vl_nested": Variant(
            "qwen3",
            {"config.json": three_files["config.json"]} | nested,
            OLD_IDS,
        ),
        "qwen3_vl_image_file": Variant(
            "qwen3", qwen("qwen3_vl", three, OLD_IDS, image_processor(), None), OLD_IDS
        ),
        "qwen3_vl_no_types": Variant(
            "qwen3",
            qwen(
                "qwen3_vl",
                three,
                OLD_IDS,
                image_processor(image_processor_type=...),
                three_video(video_processor_type=..., min_pixels=100000, max_pixels=200000),
            ),
            OLD_IDS,
        ),
        # vLLM chooses the loader by the file that the processor does not read.
        "qwen3_vl_other_loader": Variant(
            "qwen3",
            {"config.json": three_files["config.json"], VIDEO_FILE: two_video()} | nested,
            OLD_IDS,
        ),
        "qwen3_vl_moe": Variant(
            "qwen3",
            qwen(
                "qwen3_vl_moe",
                "Qwen3VLMoeForConditionalGeneration",
                OLD_IDS,
                image_processor(),
                three_video(),
            ),
            OLD_IDS,
        ),
        "qwen3_5_moe": Variant(
            "qwen3",
            qwen(
                "qwen3_5_moe",
                "Qwen3_5MoeForConditionalGeneration",
                NEW_IDS,
                image_processor(),
                three_video(),
            ),
            NEW_IDS,
        ),
        "qwen3_vl_evs": Variant("qwen3", three_files, OLD_IDS, evs),
        "qwen3_vl_vidcom2": Variant("qwen3", three_files, OLD_IDS, vidcom2),
        "qwen3_vl_kwargs": Variant(
            "qwen3",
            three_files,
            OLD_IDS,
            {"mm_processor_kwargs": {"size": {"longest_edge": 2000000}, "min_pixels": 500000}},
        ),
        "qwen3_5": Variant("qwen3", five_files, NEW_IDS),
        "qwen3_5_evs": Variant("qwen3", five_files, NEW_IDS, {"video_pruning_rate": 0.3}),
        "llava_onevision": Variant("llava", onevision, ONEVISION_IDS),
        "llava_next_video": Variant("llava", next_video, NEXT_IDS, media_io={"num_frames": 8}),
    }
