"""LLaVA-OneVision: SigLIP in front of a Qwen2 text model, for images in tiles and for videos."""

import transformers
from families import TinyModel
from published import nest_vision_model
from sizes import TEXT, VISION
from vocabulary import Vocabulary, byte_level

# Published: 384 pixels, which are 27×27 patches. Here: 5×5, also an odd number, because each frame
# of a video is pooled by two.
IMAGE_SIZE = 70
PATCH_SIZE = 14
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2
# As published, in units of the image size.
PINPOINTS = [
    [rows * IMAGE_SIZE, columns * IMAGE_SIZE] for rows in range(1, 7) for columns in range(1, 7)
]

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]

# Like the published template: images and videos precede the text of their turn.
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + ' ' }}
{%- if message['content'] is string -%}
{{ '\\n' + message['content'] }}
{%- else -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}
{{ '<image>' }}
{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'video') -%}
{{ '<video>' }}
{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}
{{ '\\n' + part['text'] }}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def vocabulary():
    tokenizer = byte_level(SPECIAL_TOKENS)
    return Vocabulary(
        tokenizer, SPECIAL_TOKENS, TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def make_llavaov():
    vocab = vocabulary()
    config = transformers.LlavaOnevisionConfig(
        text_config={
            **TEXT,
            "model_type": "qwen2",
            "vocab_size": vocab.size,
            "bos_token_id": vocab.ids["<|endoftext|>"],
            "eos_token_id": vocab.ids["<|im_end|>"],
        },
        vision_config={
            **VISION,
            "model_type": "siglip_vision_model",
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        image_token_index=vocab.ids["<image>"],
        video_token_index=vocab.ids["<video>"],
        image_grid_pinpoints=PINPOINTS,
    )
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            size=size, image_grid_pinpoints=PINPOINTS
        ),
        tokenizer=vocab.tokenizer,
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=TOKENS_PER_IMAGE,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
    )
    model = transformers.LlavaOnevisionForConditionalGeneration(config)
    return TinyModel(model, processor, nest_vision_model, media=("image", "video"))
