"""Gemma 3: SigLIP before a text model with sliding windows."""

import transformers
from families import TinyModel
from published import nest_vision_model
from sizes import TEXT, VISION
from vocabulary import Vocabulary, byte_fallback

# Published: 896 pixels and 256 tokens. Here 8×8 patches, pooled by 2×2.
IMAGE_SIZE = 112
PATCH_SIZE = 14
TOKENS = 16

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
# Gemma's tokenizer finds runs of newlines before BPE; the expansion of an image joins them with its own.
NEWLINES = ["\n" * count for count in range(1, 5)]

# Like the published one: the system's text goes in front of the first user turn, the assistant is "model".
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
    tokenizer = byte_fallback(SPECIAL_TOKENS, bos="<bos>", prefix_space=False, plain=NEWLINES)
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
    words = vocabulary()
    config = transformers.Gemma3Config(
        text_config={
            **TEXT,
            "vocab_size": words.size,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            # Shorter than a prompt with an image, so that the window matters.
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "bos_token_id": words.ids["<bos>"],
            "eos_token_id": words.ids["<eos>"],
            "pad_token_id": words.ids["<pad>"],
        },
        vision_config={
            **VISION,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        mm_tokens_per_image=TOKENS,
        boi_token_index=words.ids["<start_of_image>"],
        eoi_token_index=words.ids["<end_of_image>"],
        image_token_index=words.ids["<image_soft_token>"],
    )
    image_processor = transformers.Gemma3ImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    processor = transformers.Gemma3Processor(
        image_processor=image_processor,
        tokenizer=words.tokenizer,
        chat_template=TEMPLATE,
        image_seq_length=TOKENS,
    )
    return TinyModel(transformers.Gemma3ForConditionalGeneration(config), processor, nest_vision_model)
