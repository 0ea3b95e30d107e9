"""MiniCPM-V 4.6: SigLIP on slices in front of a Qwen3.5 text model.

The expansion of an item in a prompt depends on its number.
"""

import transformers
from families import TinyModel
from families.qwen import qwen35_text_config
from sizes import VISION
from vocabulary import QWEN35_SPLIT, Vocabulary, byte_level

# Published: 448 pixels, which are 64 tokens per slice. Here: 8×8 patches, merged two by two twice
# into 4 tokens.
SLICE_SIZE = 112
PATCH_SIZE = 14

# By the processor's names for the tokens.
NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *NAMED_TOKENS.values()]

TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}
<|image_pad|>
{%- elif part.type == 'video' -%}
<|video_pad|>
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def vocabulary():
    tokenizer = byte_level(SPECIAL_TOKENS, split=QWEN35_SPLIT)
    return Vocabulary(
        tokenizer,
        SPECIAL_TOKENS,
        TEMPLATE,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMED_TOKENS,
    )


def make_minicpmv46():
    vocab = vocabulary()
    config = transformers.MiniCPMV4_6Config(
        text_config={**qwen35_text_config(vocab), "model_type": "qwen3_5_text"},
        vision_config={**VISION, "image_size": SLICE_SIZE, "patch_size": PATCH_SIZE},
        # The first merge is between the two layers.
        insert_layer_id=0,
        image_size=SLICE_SIZE,
        image_token_id=vocab.ids["<|image_pad|>"],
        video_token_id=vocab.ids["<|video_pad|>"],
    )
    slices = {"scale_resolution": SLICE_SIZE, "patch_size": PATCH_SIZE}
    processor = transformers.MiniCPMV4_6Processor(
        image_processor=transformers.MiniCPMV4_6ImageProcessor(**slices),
        # vLLM samples the frames before it calls the processor.
        video_processor=transformers.MiniCPMV4_6VideoProcessor(**slices, do_sample_frames=False),
        tokenizer=vocab.tokenizer,
        chat_template=TEMPLATE,
    )
    model = transformers.MiniCPMV4_6ForConditionalGeneration(config)
    return TinyModel(model, processor, media=("image", "video"))
