"""Gemma 3: SigLIP in front of a text model with sliding windows."""

import transformers
from families import TinyModel
from published import nest_vision_model
from sizes import TEXT, VISION
from vocabulary import Vocabulary, byte_fallback

# Published: 896 pixels and 256 tokens. Here: 8×8 patches, pooled by 2×2.
IMAGE_SIZE = 112
PATCH_SIZE = 14
TOKENS_PER_IMAGE = 16

SPECIAL_TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
]
# Gemma's tokenizer matches runs of newlines before BPE. They merge with the newlines of an expanded
# image.
NEWLINES = ["\n" * count for count in range(1, 5)]

# Like the published template: the system text precedes the first user turn, and the assistant is
# "model".
TEMPLATE = """\
{{ bos_token }}
{%- set state = namespace(prefix='') -%}
{%- if messages[0]['role'] == 'system' -%}
{%- if messages[0]['content'] is string -%}
{%- set state.prefix = messages[0]['content'] + '\\n\\n' -%}
{%- else -%}
{%- set state.prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
{%- endif -%}
{%- endif -%}
{%- for message in messages if message['role'] != 'system' -%}
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{%- if loop.first -%}
{{ state.prefix }}
{%- endif -%}
{%- if message['content'] is string -%}
{{ message['content'] | trim }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{ '<start_of_image>' }}
{%- elif part['type'] == 'text' -%}
{{ part['text'] | trim }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""


def vocabulary():
    tokenizer = byte_fallback(
        SPECIAL_TOKENS, bos="<bos>", prefix_space=False, plain_tokens=NEWLINES
    )
    return Vocabulary(
        tokenizer,
        SPECIAL_TOKENS,
        TEMPLATE,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )


def make_gemma3():
    vocab = vocabulary()
    config = transformers.Gemma3Config(
        text_config={
            **TEXT,
            "vocab_size": vocab.size,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            # Shorter than a prompt with an image, so that the window has an effect.
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "bos_token_id": vocab.ids["<bos>"],
            "eos_token_id": vocab.ids["<eos>"],
            "pad_token_id": vocab.ids["<pad>"],
        },
        vision_config={
            **VISION,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        boi_token_index=vocab.ids["<start_of_image>"],
        eoi_token_index=vocab.ids["<end_of_image>"],
        image_token_index=vocab.ids["<image_soft_token>"],
    )
    image_processor = transformers.Gemma3ImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    processor = transformers.Gemma3Processor(
        image_processor=image_processor,
        tokenizer=vocab.tokenizer,
        chat_template=TEMPLATE,
        image_seq_length=TOKENS_PER_IMAGE,
    )
    return TinyModel(
        transformers.Gemma3ForConditionalGeneration(config), processor, nest_vision_model
    )
