"""Llama 4: tiles and a global tile in front of a mixture of experts."""

import transformers
from families import TinyModel
from sizes import TEXT, VISION
from vocabulary import Vocabulary, byte_level

# Published: tiles of 336 pixels. Here: 8×8 patches, 16 tokens per tile.
TILE_SIZE = 112
PATCH_SIZE = 14
# The maximum number of tiles besides the global tile, as published.
MAX_TILES = 16

SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom|>",
    "<|eot|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|finetune_right_pad|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image|>",
    "<|patch|>",
]

# Like the published template, without tools.
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|header_start|>' + message['role'] + '<|header_end|>\\n\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|image|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|header_start|>assistant<|header_end|>\\n\\n' -}}
{%- endif -%}
"""


def vocabulary():
    tokenizer = byte_level(SPECIAL_TOKENS, bos="<|begin_of_text|>")
    return Vocabulary(
        tokenizer,
        SPECIAL_TOKENS,
        TEMPLATE,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot|>",
        pad_token="<|finetune_right_pad|>",
    )


def make_llama4():
    vocab = vocabulary()
    config = transformers.Llama4Config(
        text_config={
            **TEXT,
            # One layer of each kind: dense and experts, with and without positions.
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 4,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size": 64,
            "intermediate_size_mlp": TEXT["intermediate_size"],
            "head_dim": 64,
            "attention_chunk_size": 2048,
            # As in Maverick. Scout's norm has no scale that would make the attention of random
            # weights less flat.
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "vocab_size": vocab.size,
            "bos_token_id": vocab.ids["<|begin_of_text|>"],
            "eos_token_id": vocab.ids["<|eot|>"],
            "pad_token_id": vocab.ids["<|finetune_right_pad|>"],
        },
        vision_config={
            **VISION,
            # Four patches side by side, as the pixel shuffle arranges them.
            "intermediate_size": 4 * VISION["hidden_size"],
            "vision_output_dim": TEXT["hidden_size"],
            "projector_input_dim": TEXT["hidden_size"],
            "projector_output_dim": TEXT["hidden_size"],
            "image_size": TILE_SIZE,
            "patch_size": PATCH_SIZE,
            "pixel_shuffle_ratio": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        boi_token_index=vocab.ids["<|image_start|>"],
        eoi_token_index=vocab.ids["<|image_end|>"],
        image_token_index=vocab.ids["<|patch|>"],
    )
    image_processor = transformers.Llama4ImageProcessor(
        size={"height": TILE_SIZE, "width": TILE_SIZE},
        max_patches=MAX_TILES,
        resize_to_max_canvas=False,
    )
    processor = transformers.Llama4Processor(
        image_processor=image_processor,
        tokenizer=vocab.tokenizer,
        patch_size=PATCH_SIZE,
        pixel_shuffle_ratio=0.5,
        chat_template=TEMPLATE,
    )
    return TinyModel(transformers.Llama4ForConditionalGeneration(config), processor)
