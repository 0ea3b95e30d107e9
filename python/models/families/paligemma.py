"""PaliGemma: SigLIP in front of Gemma. The image has no marker: its tokens precede the prompt."""

import transformers
from families import TinyModel
from published import nest_vision_model
from sizes import TEXT, VISION
from vocabulary import Vocabulary, byte_fallback

# Published: 224 pixels and 256 tokens. Here: 4×4 patches.
IMAGE_SIZE = 56
PATCH_SIZE = 14
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2

SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<image>"]
# Every prompt with an image ends with a newline, which must be a single token.
NEWLINES = ["\n"]

# No template is published, because the model answers a single prompt without turns. This one joins
# the texts and writes nothing for an image.
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
        extra_special_tokens={"image_token": "<image>"},
    )


def make_paligemma():
    vocab = vocabulary()
    image_processor = transformers.SiglipImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, image_seq_length=TOKENS_PER_IMAGE
    )
    processor = transformers.PaliGemmaProcessor(
        image_processor=image_processor, tokenizer=vocab.tokenizer, chat_template=TEMPLATE
    )
    # The processor has added tokens for locations and segmentation masks.
    vocab_size = len(vocab.tokenizer)
    config = transformers.PaliGemmaConfig(
        text_config={
            **TEXT,
            "model_type": "gemma",
            "head_dim": 64,
            "vocab_size": vocab_size,
            "bos_token_id": vocab.ids["<bos>"],
            "eos_token_id": vocab.ids["<eos>"],
            "pad_token_id": vocab.ids["<pad>"],
        },
        vision_config={
            **VISION,
            "model_type": "siglip_vision_model",
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        image_token_index=vocab.ids["<image>"],
        vocab_size=vocab_size,
        projection_dim=TEXT["hidden_size"],
        hidden_size=TEXT["hidden_size"],
    )
    return TinyModel(
        transformers.PaliGemmaForConditionalGeneration(config), processor, nest_vision_model
    )
