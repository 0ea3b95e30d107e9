#!/usr/bin/env python3
"""Makes the assets of `chiasm demo`: a model directory without weights, and six small pictures.

Run by hand from the repository's root when the demo changes; needs transformers and Pillow. The
output is committed: crates/chiasm/assets/model (tokenizer, chat template, configuration) and
crates/chiasm/assets/images.
"""

import json
import math
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ASSETS = Path("crates/chiasm/assets")

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]

# The training text contains the demo's sentences, so the small vocabulary splits them into few
# tokens.
CORPUS = """
You are a careful assistant who looks at pictures and describes what is in them.
What is in this picture? What do these pictures have in common? Compare the first picture \
with the second.
Describe the colours of this picture. Which of these pictures is the brightest? \
Tell a short story about it.
no images; 1 image 280x224 (80 tokens); 2 images 336x252 448x224 (108 + 128 tokens); 3 images
64 of 109 prompt tokens were cached 0123456789
system user assistant
"""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'text' -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def write_model(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        # Sorted because alphabet() has hash order. Token ids are then the same in every run.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 8, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(out / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}

    def write_json(name: str, value: dict) -> None:
        (out / name).write_text(json.dumps(value, indent=2) + "\n")

    write_json("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    })
    write_json("config.json", {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 8192,
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    })
    write_json("processor_config.json", {
        "processor_class": "Qwen2VLProcessor",
        "image_processor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "merge_size": 2,
            "patch_size": 14,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"shortest_edge": 3136, "longest_edge": 1003520},
            "temporal_patch_size": 2,
        },
    })
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def picture(width: int, height: int, hue: int) -> Image.Image:
    """Draws sky, hills and a sun in a colour of the given hue."""
    image = Image.new("HSV", (width, height))
    pixels = image.load()
    for y in range(height):
        for x in range(width):
            pixels[x, y] = (hue, 90 + 100 * y // height, 250 - 120 * y // height)
    image = image.convert("RGB")
    draw = ImageDraw.Draw(image)
    radius = height // 7
    sun = (width * (1 + hue % 5) // 7, height // 4)
    bounds = [sun[0] - radius, sun[1] - radius, sun[0] + radius, sun[1] + radius]
    draw.ellipse(bounds, fill=(255, 240, 170))
    for layer in range(3):
        base = height * (6 + layer) // 10
        hill = [
            (x, base + math.sin(x / (23 + 11 * layer) + hue) * height / 14)
            for x in range(-1, width + 8, 8)
        ]
        shade = 120 - 35 * layer
        colour = (shade // 2, shade, shade * 2 // 3)
        draw.polygon([*hill, (width, height), (0, height)], fill=colour)
    return image


def write_images(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    sizes = {
        "dawn": (280, 224),
        "noon": (336, 252),
        "dusk": (448, 224),
        "night": (280, 224),
        "storm": (280, 224),
        "snow": (224, 280),
    }
    for index, (name, (width, height)) in enumerate(sizes.items()):
        picture(width, height, 17 + 40 * index).save(out / f"{name}.jpg", quality=85)


if __name__ == "__main__":
    write_model(ASSETS / "model")
    write_images(ASSETS / "images")
