"""Qwen2.5-Omni without speech output: the thinker alone, in the layout of the whole model."""

import json

import transformers
from families import TinyModel
from families.qwen import text_config
from published import rewrite_weights, write_json
from sizes import AUDIO, MEL_BANDS, TEXT, VISION_HIDDEN
from vocabulary import Vocabulary, byte_level

MEDIA_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *MEDIA_TOKENS.values()]

# Like the published template.
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
<|vision_bos|><|IMAGE|><|vision_eos|>
{%- elif part['type'] == 'audio' -%}
<|audio_bos|><|AUDIO|><|audio_eos|>
{%- elif part['type'] == 'video' -%}
<|vision_bos|><|VIDEO|><|vision_eos|>
{%- elif part['type'] == 'text' -%}
{{ part['text'] }}
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
    tokenizer = byte_level(SPECIAL_TOKENS)
    return Vocabulary(
        tokenizer,
        SPECIAL_TOKENS,
        TEMPLATE,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        # The processor of transformers finds its tokens by these names.
        extra_special_tokens=MEDIA_TOKENS,
    )


def thinker_config(vocab):
    return transformers.Qwen2_5OmniThinkerConfig(
        # The engine reads this from the text's own configuration. The published embeddings are not
        # tied.
        text_config=text_config(
            vocab, {"type": "mrope", "mrope_section": [8, 12, 12]}, tie_word_embeddings=False
        ),
        audio_config={**AUDIO, "n_window": 100, "output_dim": TEXT["hidden_size"]},
        vision_config={
            "depth": 2,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "out_hidden_size": TEXT["hidden_size"],
        },
        audio_token_index=vocab.ids["<|AUDIO|>"],
        image_token_index=vocab.ids["<|IMAGE|>"],
        video_token_index=vocab.ids["<|VIDEO|>"],
        audio_start_token_id=vocab.ids["<|audio_bos|>"],
        audio_end_token_id=vocab.ids["<|audio_eos|>"],
        vision_start_token_id=vocab.ids["<|vision_bos|>"],
        vision_end_token_id=vocab.ids["<|vision_eos|>"],
        # As published: audio and video frames form chunks of two seconds.
        position_id_per_seconds=25,
        seconds_per_chunk=2,
    )


def nest_thinker(directory):
    """Rewrites weights and config.json as the thinker of a whole model, as published."""
    rewrite_weights(
        directory, lambda tensors: {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    )
    path = directory / "config.json"
    thinker = json.loads(path.read_text())
    whole = {
        "architectures": ["Qwen2_5OmniForConditionalGeneration"],
        "model_type": "qwen2_5_omni",
        "enable_audio_output": False,
        "thinker_config": thinker,
    }
    write_json(path, whole)


def make_omni():
    vocab = vocabulary()
    processor = transformers.Qwen2_5OmniProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        video_processor=transformers.Qwen2VLVideoProcessor(),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=MEL_BANDS),
        tokenizer=vocab.tokenizer,
        chat_template=TEMPLATE,
    )
    model = transformers.Qwen2_5OmniThinkerForConditionalGeneration(thinker_config(vocab))
    return TinyModel(model, processor, nest_thinker, media=("image", "audio", "video"))
