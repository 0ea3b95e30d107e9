"""InternVL 2.5 and 3 in OpenGVLab's format: vLLM's own processor, which resizes with Pillow."""

import random

from transformers import AutoConfig, PretrainedConfig, Qwen2Config
from vllm.transformers_utils.processors.internvl import (
    calculate_internvl_targets,
    get_internvl_target_ratios,
    resolve_internvl_min_max_num,
)

from families import internvl
from families.family import (
    FEW_SIZES,
    Family,
    Model,
    with_changes,
    without_kwargs,
)

TILE = 448
VOCABULARY = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
    "<img>": 151665, "</img>": 151666, "<IMG_CONTEXT>": 151667,
}  # fmt: skip
# Qwen2.5's tokenizer has a token for ">\n", which hides an "<image>" before a line break.
MERGES = ((">", "Ċ"), (">", "ĊĊ"), ("Ċ", "Ċ"))


class VisionConfig(PretrainedConfig):
    """The defaults of the checkpoints' configuration_intern_vit.py."""

    model_type = "intern_vit_6b"

    def __init__(self, image_size: int = 224, patch_size: int = 14, **kwargs) -> None:
        super().__init__(**kwargs)
        self.image_size = image_size
        self.patch_size = patch_size


class ChatConfig(PretrainedConfig):
    """The defaults of the checkpoints' configuration_internvl_chat.py.

    vLLM runs that file as remote code.
    """

    model_type = "internvl_chat"

    def __init__(
        self,
        vision_config: dict | None = None,
        llm_config: dict | None = None,
        downsample_ratio: float = 0.5,
        dynamic_image_size: bool = False,
        use_thumbnail: bool = False,
        min_dynamic_patch: int = 1,
        max_dynamic_patch: int = 6,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.vision_config = VisionConfig(**(vision_config or {}))
        self.llm_config = self.text_config = Qwen2Config(**(llm_config or {}))
        self.downsample_ratio = downsample_ratio
        self.dynamic_image_size = dynamic_image_size
        self.use_thumbnail = use_thumbnail
        self.min_dynamic_patch = min_dynamic_patch
        self.max_dynamic_patch = max_dynamic_patch


AutoConfig.register("internvl_chat", ChatConfig)


def config(**changes) -> dict:
    """Returns the image settings in config.json of InternVL3-8B, with changes."""
    vision = {
        "hidden_size": 1024,
        "image_size": TILE,
        "model_type": "intern_vit_6b",
        "patch_size": 14,
    }
    settings = {
        "architectures": ["InternVLChatModel"],
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": TILE,
        "llm_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 151674,
        },
        "max_dynamic_patch": 12,
        "min_dynamic_patch": 1,
        "model_type": "internvl_chat",
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "use_thumbnail": True,
        "vision_config": with_changes(vision, **changes.pop("vision", {})),
    }
    return with_changes(settings, **changes)


def image_processor() -> dict:
    """Returns preprocessor_config.json of InternVL3-8B, which vLLM does not read."""
    return {
        "crop_size": TILE,
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor",
        "image_mean": internvl.IMAGENET_MEAN,
        "image_std": internvl.IMAGENET_STD,
        "resample": 3,
        "size": TILE,
    }


KWARGS = [
    {"max_dynamic_patch": 4},
    {"max_dynamic_patch": 1},
    {"min_dynamic_patch": 3},
    {"min_dynamic_patch": 2, "max_dynamic_patch": 2},
    {"min_dynamic_patch": 5, "max_dynamic_patch": 3},
    {"dynamic_image_size": False},
    {"use_thumbnail": False},
    {"image_size": 224},
    {"max_dynamic_patch": 0},
    {"max_dynamic_patch": None},
    {"size": {"height": 224, "width": 224}},
]


def models() -> dict[str, Model]:
    def model(
        trials=without_kwargs([(61, 83), (500, 337), (301, 700)]), full=False, **changes
    ) -> Model:
        files = {"config.json": config(**changes), "preprocessor_config.json": image_processor()}
        return Model(files, VOCABULARY, trials, merges=MERGES, texts=("<image>",), full=full)

    kwargs = [(size, kwargs) for kwargs in KWARGS for size in [(61, 83), (700, 337)]]
    absent = [
        "downsample_ratio",
        "dynamic_image_size",
        "max_dynamic_patch",
        "min_dynamic_patch",
        "use_thumbnail",
    ]
    return {
        "internvl3_8b": model(without_kwargs(internvl.MAIN_SIZES) + kwargs, full=True),
        "internvl2_5_1b": model(select_layer=-1, template="internvl2_5"),
        "defaults": model(**dict.fromkeys(absent, ...)),
        "no_thumbnail": model(use_thumbnail=False),
        "not_dynamic": model(dynamic_image_size=False),
        "min_3_max_5": model(without_kwargs(FEW_SIZES), min_dynamic_patch=3, max_dynamic_patch=5),
        "small_tower": model(without_kwargs(FEW_SIZES), vision={"image_size": 224}),
        "other_patch": model(vision={"patch_size": 16}),
        "other_ratio": model(downsample_ratio=0.25),
    }


def plans() -> tuple[list[str], list[list]]:
    rng = random.Random("plans of internvl_chat")
    rows = []
    for _ in range(1000):
        tile = rng.choice([TILE, TILE, 224])
        min_tiles, max_tiles = rng.choice(
            [(1, 12), (1, 12), (1, 12), (1, 6), (1, 40), (4, 12), (2, 2), (1, 1), (3, 2)]
        )
        thumbnail = rng.random() < 0.8
        low, high = resolve_internvl_min_max_num(
            min_dynamic_patch=min_tiles,
            max_dynamic_patch=max_tiles,
            dynamic_image_size=True,
            use_thumbnail=False,
        )
        width, height = internvl.random_size(rng, tile)
        count, target_width, target_height = calculate_internvl_targets(
            orig_width=width,
            orig_height=height,
            target_ratios=get_internvl_target_ratios(low, high),
            image_size=tile,
            use_thumbnail=thumbnail,
        )
        grid = [target_width // tile, target_height // tile]
        rows.append([width, height, tile, min_tiles, max_tiles, int(thumbnail), *grid, count])
    return [
        "width",
        "height",
        "tile",
        "min",
        "max",
        "use_thumbnail",
        "columns",
        "rows",
        "tiles",
    ], rows


def engine_accepts(settings: dict, _size, case: dict) -> bool:
    """Returns True if the item has the vision tower's size and the right number of embeddings.

    InternVLImagePixelInputs takes no other size.
    """
    side = settings["vision_config"]["image_size"]
    shape = case["tensors"]["pixel_values_flat"]["shape"]
    per_tile = int(
        (side // settings["vision_config"]["patch_size"]) ** 2
        * settings.get("downsample_ratio", 0.5) ** 2
    )
    embeddings = sum(count for _, count, embeds in case["placeholder"] if embeds)
    return shape[-2:] == [side, side] and embeddings == shape[0] * per_tile


PROMPTS = [
    ("internvl3_8b", text, sizes, {})
    for text, sizes in [
        ("<|im_start|>user\n<image>\nwhat is this?<|im_end|>\n", [(30, 40)]),
        ("<image>what is this?", [(30, 40)]),
        ("a<image>\n\nb", [(30, 40)]),
        ("<image>\n<image>\nb", [(30, 40), (900, 300)]),
        ("<image><image>", [(30, 40), (900, 300)]),
        ("Image-1: <image>\nImage-2: <image>\ncompare", [(30, 40), (900, 300)]),
    ]
]

FAMILY = Family(
    prompt="<image>", models=models(), engine_accepts=engine_accepts, plans=plans, prompts=PROMPTS
)
