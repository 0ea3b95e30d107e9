"""Qwen2-Audio: Whisper's encoder in front of a Qwen2 text model."""

import transformers
from families import TinyModel
from published import rewrite_weights
from sizes import AUDIO, MEL_BANDS, TEXT
from vocabulary import Vocabulary, byte_level

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
]

# Like the published template: it adds a system turn if there is none, and numbers the sounds.
TEMPLATE = """\
{%- set sounds = namespace(count=0) -%}
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'audio' -%}
{%- set sounds.count = sounds.count + 1 -%}
{{ 'Audio ' ~ sounds.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' }}
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
        tokenizer, SPECIAL_TOKENS, TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def nest_language_model(directory):
    """Renames the text model's weights to the published names.

    The published text model is a complete causal model; transformers 5 nests it one level deeper.
    """

    def published_name(name):
        return name.replace("language_model.model.model.", "language_model.model.", 1)

    rewrite_weights(
        directory,
        lambda tensors: {published_name(name): tensor for name, tensor in tensors.items()},
    )


def make_qwen2audio():
    vocab = vocabulary()
    config = transformers.Qwen2AudioConfig(
        text_config={
            **TEXT,
            "model_type": "qwen2",
            "vocab_size": vocab.size,
            "bos_token_id": vocab.ids["<|endoftext|>"],
            "eos_token_id": vocab.ids["<|im_end|>"],
        },
        audio_config={**AUDIO, "model_type": "qwen2_audio_encoder"},
        audio_token_index=vocab.ids["<|AUDIO|>"],
    )
    processor = transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=MEL_BANDS),
        tokenizer=vocab.tokenizer,
        chat_template=TEMPLATE,
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    return TinyModel(model, processor, nest_language_model, media=("audio",))
