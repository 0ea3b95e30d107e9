"""Mistral Small in both published forms: that of transformers, and Mistral's own.

vLLM prefers Mistral's own form. Both have the same weights and vocabulary. Mistral's tokenizer
renders conversations by code, not with a template.
"""

import base64
import re

import transformers
from families import TinyModel
from families.pixtral import (
    MERGE_SIZE,
    MISTRAL_EDGE,
    MISTRAL_PATCH,
    MISTRAL_TEMPLATE,
    shared_settings,
    make_processor,
)
from published import WEIGHTS, write_json
from safetensors.torch import load_file, save_file
from sizes import TEXT, VISION
from vocabulary import TEKKEN_SPLIT, Vocabulary, token_bytes, tekken

# The order is fixed up to version 7 of the tokenizer.
SPECIAL_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]
VISION_HEAD = VISION["hidden_size"] // VISION["num_attention_heads"]

# Replacements from the names in transformers to Mistral's own.
MISTRAL_NAMES = [
    (r"^language_model\.model\.embed_tokens\.", "tok_embeddings."),
    (r"^language_model\.(model\.)?", ""),
    (r"^lm_head\.", "output."),
    (r"^vision_tower\.", "vision_encoder."),
    (r"^multi_modal_projector\.patch_merger\.", "patch_merger."),
    (r"^multi_modal_projector\.norm\.", "pre_mm_projector_norm."),
    (r"^multi_modal_projector\.linear_1\.", "vision_language_adapter.w_in."),
    (r"^multi_modal_projector\.linear_2\.", "vision_language_adapter.w_out."),
    (r"\.(self_attn|attention)\.([qkvo])_proj\.", r".attention.w\2."),
    (r"\.(mlp|feed_forward)\.gate_proj\.", ".feed_forward.w1."),
    (r"\.(mlp|feed_forward)\.down_proj\.", ".feed_forward.w2."),
    (r"\.(mlp|feed_forward)\.up_proj\.", ".feed_forward.w3."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
]


def make_mistral_small():
    tokenizer = tekken(SPECIAL_TOKENS, bos="<s>")
    vocab = Vocabulary(
        tokenizer,
        SPECIAL_TOKENS,
        MISTRAL_TEMPLATE,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    settings = shared_settings(vocab, MISTRAL_EDGE, MISTRAL_PATCH)
    config = transformers.Mistral3Config(
        **settings, spatial_merge_size=MERGE_SIZE, multimodal_projector_bias=False
    )
    processor = make_processor(vocab, MISTRAL_EDGE, MISTRAL_PATCH, spatial_merge_size=MERGE_SIZE)

    def publish(directory):
        write_json(directory / "params.json", params_file(vocab, config))
        write_json(directory / "tekken.json", tekken_file(tokenizer))
        tensors = {
            mistral_name(name): tensor for name, tensor in load_file(directory / WEIGHTS).items()
        }
        save_file(tensors, directory / "consolidated.safetensors", metadata={"format": "pt"})
        (directory / "consolidated.safetensors").chmod(0o644)

    return TinyModel(transformers.Mistral3ForConditionalGeneration(config), processor, publish)


def mistral_name(name):
    for pattern, own in MISTRAL_NAMES:
        name = re.sub(pattern, own, name)
    return name


def params_file(vocab, config):
    text = config.text_config
    return {
        "dim": TEXT["hidden_size"],
        "n_layers": TEXT["num_hidden_layers"],
        "head_dim": text.head_dim,
        "hidden_dim": TEXT["intermediate_size"],
        "n_heads": TEXT["num_attention_heads"],
        "n_kv_heads": TEXT["num_key_value_heads"],
        "rope_theta": text.rope_parameters["rope_theta"],
        "norm_eps": text.rms_norm_eps,
        "vocab_size": vocab.size,
        "max_position_embeddings": TEXT["max_position_embeddings"],
        "vision_encoder": {
            "hidden_size": VISION["hidden_size"],
            "num_channels": 3,
            "image_size": MISTRAL_EDGE,
            "max_image_size": MISTRAL_EDGE,
            "patch_size": MISTRAL_PATCH,
            "rope_theta": config.vision_config.rope_parameters["rope_theta"],
            "intermediate_size": VISION["intermediate_size"],
            "num_hidden_layers": VISION["num_hidden_layers"],
            "num_attention_heads": VISION["num_attention_heads"],
            "head_dim": VISION_HEAD,
            "adapter_bias": False,
            "mm_projector_id": "patch_merge",
            "spatial_merge_size": MERGE_SIZE,
            "add_pre_mm_projector_layer_norm": True,
            "image_token_id": vocab.ids["[IMG]"],
            "image_break_token_id": vocab.ids["[IMG_BREAK]"],
            "image_end_token_id": vocab.ids["[IMG_END]"],
        },
    }


def tekken_file(tokenizer):
    """Returns Mistral's own file of the same vocabulary.

    The special tokens come first, then all others in the order of their merges.
    """
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda token: token[1])
    tokens = tokens[len(SPECIAL_TOKENS) :]
    return {
        "config": {
            "pattern": TEKKEN_SPLIT,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + len(SPECIAL_TOKENS),
            "default_num_special_tokens": len(SPECIAL_TOKENS),
            "version": "v7",
        },
        "vocab": [
            {
                "rank": rank,
                "token_bytes": base64.b64encode(token_bytes(token)).decode(),
                "token_str": None,
            }
            for rank, (token, _) in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(SPECIAL_TOKENS)
        ],
        "multimodal": {
            "image_patch_size": MISTRAL_PATCH,
            "max_image_size": MISTRAL_EDGE,
            "spatial_merge_size": MERGE_SIZE,
        },
    }
