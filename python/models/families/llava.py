"""LLaVA-1.5 and LLaVA-NeXT: CLIP in front of a Llama or Mistral text model."""

import transformers
from families import TinyModel
from published import nest_vision_model
from sizes import TEXT, VISION
from vocabulary import Vocabulary, byte_fallback

# Published: 336 pixels, which are 576 tokens. Here: 4×4 patches.
IMAGE_SIZE = 56
PATCH_SIZE = 14
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2

SPECIAL_TOKENS = ["<s>", "</s>", "<pad>", "<image>"]

# Like the published template: no system turn, the images of a turn before its text, and content as
# parts only.
LLAVA_TEMPLATE = """\
{%- for message in messages if message['role'] != 'system' -%}
{{ message['role'] | upper + ': ' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}
{{ '<image>\\n' }}
{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}
{{ part['text'] + ' ' }}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ 'ASSISTANT:' }}
{%- endif -%}
"""

# Like the template of LLaVA-NeXT on Mistral.
LLAVA_NEXT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{ '<<SYS>>\\n' + message['content'][0]['text'] + '\\n<</SYS>>\\n\\n' }}
{%- elif message['role'] == 'user' -%}
{{ '[INST] ' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}
{{ '<image>\\n' }}
{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}
{{ part['text'] }}
{%- endfor -%}
{{ ' [/INST]' }}
{%- else -%}
{{ ' ' + message['content'][0]['text'] + '</s> ' }}
{%- endif -%}
{%- endfor -%}
"""


def vocabulary(template):
    tokenizer = byte_fallback(SPECIAL_TOKENS, bos="<s>", prefix_space=True)
    return Vocabulary(
        tokenizer, SPECIAL_TOKENS, template, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def shared_settings(vocab, text_type):
    """Returns the settings that both families have in common."""
    return {
        "text_config": {
            **TEXT,
            "model_type": text_type,
            "vocab_size": vocab.size,
            "bos_token_id": vocab.ids["<s>"],
            "eos_token_id": vocab.ids["</s>"],
            "pad_token_id": vocab.ids["<pad>"],
        },
        # The projector reads the second to last layer, as published.
        "vision_config": {
            **VISION,
            "model_type": "clip_vision_model",
            "num_hidden_layers": 3,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "projection_dim": 32,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "image_token_index": vocab.ids["<image>"],
        "image_seq_length": TOKENS_PER_IMAGE,
        "projector_hidden_act": "gelu",
    }


def processor_settings(vocab):
    return {
        "tokenizer": vocab.tokenizer,
        "patch_size": PATCH_SIZE,
        "vision_feature_select_strategy": "default",
        # CLIP's class token, which the strategy drops again.
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
        "chat_template": vocab.tokenizer.chat_template,
    }


def make_llava():
    vocab = vocabulary(LLAVA_TEMPLATE)
    config = transformers.LlavaConfig(**shared_settings(vocab, "llama"))
    image_processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    processor = transformers.LlavaProcessor(
        image_processor=image_processor, **processor_settings(vocab)
    )
    return TinyModel(
        transformers.LlavaForConditionalGeneration(config), processor, nest_vision_model
    )


def make_llava_next():
    vocab = vocabulary(LLAVA_NEXT_TEMPLATE)
    # The published grids, in units of the image size.
    grids = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]]
    pinpoints = [[rows * IMAGE_SIZE, columns * IMAGE_SIZE] for rows, columns in grids]
    config = transformers.LlavaNextConfig(
        **shared_settings(vocab, "mistral"),
        image_grid_pinpoints=pinpoints,
        use_image_newline_parameter=True,
    )
    image_processor = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        image_grid_pinpoints=pinpoints,
    )
    processor = transformers.LlavaNextProcessor(
        image_processor=image_processor, **processor_settings(vocab)
    )
    return TinyModel(
        transformers.LlavaNextForConditionalGeneration(config), processor, nest_vision_model
    )
