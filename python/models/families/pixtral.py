"""Pixtral in the form of transformers (`llava` with a Pixtral tower), and Mistral 3.

Mistral 3 also merges the patches.
"""

import transformers
from families import TinyModel
from sizes import TEXT, VISION
from vocabulary import Vocabulary, byte_level

# Published: up to 1024 pixels for Pixtral, 1540 for Mistral 3.
PIXTRAL_EDGE = 256
PIXTRAL_PATCH = 16
MISTRAL_EDGE = 224
MISTRAL_PATCH = 14
MERGE_SIZE = 2

SPECIAL_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
]

# Like Pixtral's template: the system text precedes the last user turn.
PIXTRAL_TEMPLATE = """\
{{- bos_token -}}
{%- set turns = messages -%}
{%- set system = none -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
{%- if message['role'] == 'user' -%}
{{- '[INST]' -}}
{%- if loop.last and system is not none -%}
{{- (system if system is string else system[0]['text']) + '\\n\\n' -}}
{%- endif -%}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- else -%}
{{- '[IMG]' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '[/INST]' -}}
{%- else -%}
{{- (message['content'] if message['content'] is string \
else message['content'][0]['text']) + eos_token -}}
{%- endif -%}
{%- endfor -%}
"""

# Like Mistral Small 3.1's template: the system turn has its own markers.
MISTRAL_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set text = message['content'] if message['content'] is string \
else message['content'][0]['text'] -%}
{%- if message['role'] == 'system' -%}
{{- '[SYSTEM_PROMPT]' + text + '[/SYSTEM_PROMPT]' -}}
{%- elif message['role'] == 'assistant' -%}
{{- text + eos_token -}}
{%- elif message['content'] is string -%}
{{- '[INST]' + text + '[/INST]' -}}
{%- else -%}
{{- '[INST]' -}}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- elif part['type'] in ['image', 'image_url'] -%}
{{- '[IMG]' -}}
{%- endif -%}
{%- endfor -%}
{{- '[/INST]' -}}
{%- endif -%}
{%- endfor -%}
"""


def vocabulary(template):
    tokenizer = byte_level(SPECIAL_TOKENS, bos="<s>")
    return Vocabulary(
        tokenizer, SPECIAL_TOKENS, template, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def shared_settings(vocab, edge, patch):
    return {
        "text_config": {
            **TEXT,
            "model_type": "mistral",
            "head_dim": 64,
            "sliding_window": None,
            "vocab_size": vocab.size,
            "bos_token_id": vocab.ids["<s>"],
            "eos_token_id": vocab.ids["</s>"],
            "pad_token_id": vocab.ids["<pad>"],
        },
        "vision_config": {
            **VISION,
            "model_type": "pixtral",
            "image_size": edge,
            "patch_size": patch,
        },
        "vision_feature_layer": -1,
        "image_token_index": vocab.ids["[IMG]"],
        "projector_hidden_act": "gelu",
    }


def make_processor(vocab, edge, patch, **more):
    image_processor = transformers.PixtralImageProcessor(
        size={"longest_edge": edge}, patch_size={"height": patch, "width": patch}
    )
    return transformers.PixtralProcessor(
        image_processor=image_processor,
        tokenizer=vocab.tokenizer,
        patch_size=patch,
        chat_template=vocab.tokenizer.chat_template,
        **more,
    )


def make_pixtral():
    vocab = vocabulary(PIXTRAL_TEMPLATE)
    config = transformers.LlavaConfig(
        **shared_settings(vocab, PIXTRAL_EDGE, PIXTRAL_PATCH),
        vision_feature_select_strategy="full",
        image_seq_length=1,
    )
    processor = make_processor(vocab, PIXTRAL_EDGE, PIXTRAL_PATCH)
    return TinyModel(transformers.LlavaForConditionalGeneration(config), processor)


def make_mistral3():
    vocab = vocabulary(MISTRAL_TEMPLATE)
    config = transformers.Mistral3Config(
        **shared_settings(vocab, MISTRAL_EDGE, MISTRAL_PATCH),
        spatial_merge_size=MERGE_SIZE,
        multimodal_projector_bias=False,
    )
    processor = make_processor(vocab, MISTRAL_EDGE, MISTRAL_PATCH, spatial_merge_size=MERGE_SIZE)
    return TinyModel(transformers.Mistral3ForConditionalGeneration(config), processor)
