"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL (dense and mixture of experts) and Qwen3.5."""

import transformers
from families import TinyModel
from published import transpose_experts
from sizes import TEXT, VISION_HIDDEN
from vocabulary import QWEN35_SPLIT, Vocabulary, byte_level

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]

# Tool calls have the format of Qwen's own models.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\\n<tools>\\n' }}
{%- for tool in tools -%}
{{ tool | tojson + '\\n' }}
{%- endfor -%}
{{ '</tools><|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' \
+ call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def vocabulary(split=None):
    tokenizer = byte_level(SPECIAL_TOKENS, split=split)
    return Vocabulary(
        tokenizer, SPECIAL_TOKENS, CHAT_TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def text_config(vocab, rope, **more):
    return {
        **TEXT,
        "vocab_size": vocab.size,
        "bos_token_id": vocab.ids["<|endoftext|>"],
        "eos_token_id": vocab.ids["<|im_end|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        **more,
    }


def marker_ids(vocab):
    return {
        "image_token_id": vocab.ids["<|image_pad|>"],
        "video_token_id": vocab.ids["<|video_pad|>"],
        "vision_start_token_id": vocab.ids["<|vision_start|>"],
        "vision_end_token_id": vocab.ids["<|vision_end|>"],
    }


def make_qwen2vl():
    vocab = vocabulary()
    config = transformers.Qwen2VLConfig(
        text_config=text_config(vocab, {"type": "mrope", "mrope_section": [8, 12, 12]}),
        vision_config={
            "depth": 2,
            "embed_dim": VISION_HIDDEN,
            "hidden_size": TEXT["hidden_size"],
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **marker_ids(vocab),
    )
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=vocab.tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    return TinyModel(transformers.Qwen2VLForConditionalGeneration(config), processor)


def make_qwen25vl():
    vocab = vocabulary()
    config = transformers.Qwen2_5_VLConfig(
        text_config=text_config(vocab, {"type": "mrope", "mrope_section": [8, 12, 12]}),
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
            "tokens_per_second": 2,
            "out_hidden_size": TEXT["hidden_size"],
        },
        **marker_ids(vocab),
    )
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=vocab.tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    return TinyModel(transformers.Qwen2_5_VLForConditionalGeneration(config), processor)


def qwen3_processor(vocab):
    """Returns a processor with the settings of the published Qwen3-VL models.

    Patches, limits and normalization differ from Qwen2-VL's.
    """
    image_processor = transformers.Qwen2VLImageProcessor(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return transformers.Qwen3VLProcessor(
        image_processor=image_processor,
        tokenizer=vocab.tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )


def qwen3_vision(depth, **more):
    return {
        "depth": depth,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": TEXT["hidden_size"],
        **more,
    }


def make_qwen3vl():
    vocab = vocabulary()
    rope = {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        text_config=text_config(vocab, rope, head_dim=64),
        vision_config=qwen3_vision(3, deepstack_visual_indexes=[0, 1]),
        **marker_ids(vocab),
    )
    return TinyModel(transformers.Qwen3VLForConditionalGeneration(config), qwen3_processor(vocab))


def make_qwen3vl_moe():
    vocab = vocabulary()
    rope = {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
    config = transformers.Qwen3VLMoeConfig(
        text_config=text_config(
            vocab,
            rope,
            head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=96,
            norm_topk_prob=True,
        ),
        vision_config=qwen3_vision(3, deepstack_visual_indexes=[0, 1]),
        **marker_ids(vocab),
    )
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    return TinyModel(model, qwen3_processor(vocab), transpose_experts)


def qwen35_text_config(vocab):
    # Rotary embeddings apply to a quarter of each head, as published.
    rope = {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    return text_config(
        vocab,
        rope,
        head_dim=64,
        layer_types=["linear_attention", "full_attention"],
        # vLLM's CPU kernel supports no narrower head. The size of these heads' state determines the
        # block size of the KV cache.
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )


def make_qwen35():
    vocab = vocabulary(QWEN35_SPLIT)
    config = transformers.Qwen3_5Config(
        text_config=qwen35_text_config(vocab),
        vision_config=qwen3_vision(2),
        **marker_ids(vocab),
    )
    return TinyModel(transformers.Qwen3_5ForConditionalGeneration(config), qwen3_processor(vocab))
