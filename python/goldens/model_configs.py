"""The model directories of the goldens: configs in every form that `transformers` reads."""

import json
from pathlib import Path

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
PROCESSOR_CLASS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}


def model_config(family: str) -> dict:
    """Returns the image settings in config.json."""
    vision = {"model_type": f"{family}_vision", "temporal_patch_size": 2, "spatial_merge_size": 2}
    vision["patch_size"] = 16 if family == "qwen3_vl" else 14
    return {"model_type": family, "image_token_id": 151655, "vision_config": vision}


def image_processor(family: str) -> dict:
    """Returns the image processor's settings in today's checkpoints."""
    settings = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": CLIP_MEAN,
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": CLIP_STD,
        "merge_size": 2,
        "patch_size": 14,
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": 1003520, "shortest_edge": 3136},
        "temporal_patch_size": 2,
    }
    if family == "qwen3_vl":
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
        settings["size"] = {"longest_edge": 16777216, "shortest_edge": 65536}
    return settings


def new_file(family: str, **changes) -> dict:
    """Returns processor_config.json with a nested image_processor.

    A change to `...` removes the key.
    """
    return {
        "image_processor": with_changes(image_processor(family), changes),
        "processor_class": PROCESSOR_CLASS[family],
    }


def old_file(family: str, **changes) -> dict:
    """Returns preprocessor_config.json of the first checkpoints.

    The bounds are min_pixels and max_pixels, and there are no flags.
    """
    settings = image_processor(family)
    size = settings["size"]
    settings |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    settings["processor_class"] = PROCESSOR_CLASS[family]
    absent = [
        "size",
        "do_convert_rgb",
        "do_normalize",
        "do_rescale",
        "do_resize",
        "resample",
        "rescale_factor",
    ]
    return with_changes(settings, {key: ... for key in absent} | changes)


def with_changes(settings: dict, changes: dict) -> dict:
    return {key: value for key, value in (settings | changes).items() if value is not ...}


def models() -> dict[str, dict[str, dict]]:
    """Returns a mapping of model name → file name → contents."""
    two = "qwen2_vl"
    three = "qwen3_vl"
    new = "processor_config.json"
    old = "preprocessor_config.json"
    files = {family: {new: new_file(family)} for family in PROCESSOR_CLASS}
    files |= {
        # The old file
        "old_qwen2_vl": {old: old_file(two)},
        "old_qwen2_vl_hub": {old: old_file(two, max_pixels=12845056)},
        "old_qwen2_5_vl_hub": {old: old_file("qwen2_5_vl", max_pixels=12845056)},
        "old_qwen3_vl_hub": {
            old: old_file(
                three,
                min_pixels=...,
                max_pixels=...,
                size={"longest_edge": 16777216, "shortest_edge": 65536},
                image_processor_type="Qwen2VLImageProcessorFast",
            )
        },
        # Precedence of the files
        "both_files": {new: new_file(two), old: old_file(two, min_pixels=50000, max_pixels=60000)},
        "both_files_but_not_nested": {
            new: {"processor_class": "Qwen2VLProcessor"},
            old: old_file(two, min_pixels=50000, max_pixels=60000),
        },
        "both_files_but_nested_null": {
            new: {"image_processor": None, "processor_class": "Qwen2VLProcessor"},
            old: old_file(two, min_pixels=50000, max_pixels=60000),
        },
        "no_file": {},
        # Names of the processor
        "type_fast": {new: new_file(two, image_processor_type="Qwen2VLImageProcessorFast")},
        "type_pil": {new: new_file(two, image_processor_type="Qwen2VLImageProcessorPil")},
        "type_missing": {new: new_file(two, image_processor_type=...)},
        "type_unknown": {new: new_file(two, image_processor_type="Qwen9VLImageProcessor")},
        # Missing keys
        "only_type": {new: {"image_processor": {"image_processor_type": "Qwen2VLImageProcessor"}}},
        "no_mean": {new: new_file(two, image_mean=...)},
        "no_size": {old: old_file(two, min_pixels=..., max_pixels=...)},
        # Forms of the bounds
        "only_min_pixels": {old: old_file(two, min_pixels=90000, max_pixels=...)},
        "only_max_pixels": {old: old_file(two, min_pixels=..., max_pixels=2500)},
        "min_pixels_beside_size": {new: new_file(two, min_pixels=90000)},
        "max_pixels_completes_size": {
            new: new_file(two, size={"shortest_edge": 90000}, max_pixels=120000)
        },
        "pixels_in_size_and_beside": {
            new: new_file(
                two, size={"min_pixels": 1, "max_pixels": 2}, min_pixels=90000, max_pixels=120000
            )
        },
        "pixels_in_size": {new: new_file(two, size={"min_pixels": 90000, "max_pixels": 120000})},
        "half_a_size": {new: new_file(two, size={"shortest_edge": 90000})},
        "square_size": {new: new_file(two, size={"height": 224, "width": 224})},
        "surplus_in_size": {
            new: new_file(two, size={"shortest_edge": 3136, "longest_edge": 90000, "height": 1})
        },
        "zero_min_pixels": {new: new_file(two, min_pixels=0)},
        # Switches and numbers of the pixel pipeline
        "no_normalize": {new: new_file(two, do_normalize=False)},
        "no_rescale": {new: new_file(two, do_rescale=False)},
        "no_rescale_no_normalize": {new: new_file(two, do_rescale=False, do_normalize=False)},
        "other_rescale_factor": {new: new_file(two, rescale_factor=1 / 127.5)},
        "odd_numbers": {
            new: new_file(
                two,
                rescale_factor=0.0041,
                image_mean=[0.1, 0.7, -0.3],
                image_std=[0.33, 1.7, 0.013],
            )
        },
        "integer_mean": {new: new_file(two, image_mean=[0, 1, 0], image_std=[1, 2, 1])},
        "one_mean_for_all": {new: new_file(two, image_mean=0.5, image_std=0.25)},
        "no_resize": {new: new_file(two, do_resize=False)},
        # Shapes of the patches
        "other_patches": {new: new_file(two, patch_size=8, merge_size=3, temporal_patch_size=1)},
    }
    for key in [*image_processor(two), "min_pixels", "max_pixels"]:
        files[f"null_{key}"] = {new: new_file(two, **{key: None})}
    for name, directory in files.items():
        family = next(
            (known for known in PROCESSOR_CLASS if name.endswith((known, f"{known}_hub"))), two
        )
        directory["config.json"] = model_config(family)
    vision = files["other_patches"]["config.json"]["vision_config"]
    vision |= {"patch_size": 8, "spatial_merge_size": 3, "temporal_patch_size": 1}
    return files


def write(root: Path) -> list[str]:
    """Writes every model directory below `root` and returns their names."""
    directories = models()
    for name, files in directories.items():
        directory = root / name
        directory.mkdir(parents=True)
        for file, contents in files.items():
            (directory / file).write_text(json.dumps(contents, indent=1) + "\n")
    return list(directories)
