"""PaliGemma: SigLIP before Gemma. Its image is not written into the prompt but inserted before it."""

import transformers
from families import TinyModel
from published import nest_vision_model
from sizes import TEXT, VISION
from vocabulary import Vocabulary, byte_fallback

# Published: 224 pixels and 256 tokens. Here 4×4 patches.
IMAGE_SIZE = 56
PATCH_SIZE = 14
TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2

SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<image>"]
# Every prompt with an image ends with a newline, which has to be one token.
NEWLINES = ["\n"]

# None is published, as the model answers a single prompt without turns. This one joins the texts; it writes nothing for
# an image.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}
{{ part['text'] }}
{%- endfor -%}
{%- endif -%}
{%- if not loop.last -%}
{{ ' ' }}
{%- endif -%}
{%- endfor -%}
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
        extra_special_tokens={"image_token": "<image>"},
    )


def make_paligemma():
    words = vocabulary()
    image_processor = transformers.SiglipImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, image_seq_length=TOKENS
    )
    processor = transformers.PaliGemmaProcessor(
        image_processor=image_processor, tokenizer=words.tokenizer, chat_template=TEMPLATE
    )
    # The processor has added its tokens for places and outlines.
    vocab_size = len(words.tokenizer)
    config = transformers.PaliGemmaConfig(
        text_config={
            **TEXT,
            "model_type": "gemma",
            "head_dim": 64,
            "vocab_size": vocab_size,
            "bos_token_id": words.ids["<bos>"],
            "eos_token_id": words.ids["<eos>"],
            "pad_token_id": words.ids["<pad>"],
        },
        vision_config={
            **VISION,
            "model_type": "siglip_vision_model",
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        image_token_index=words.ids["<image>"],
        vocab_size=vocab_size,
        projection_dim=TEXT["hidden_size"],
        hidden_size=TEXT["hidden_size"],
    )
    return TinyModel(transformers.PaliGemmaForConditionalGeneration(config), processor, nest_vision_model)
