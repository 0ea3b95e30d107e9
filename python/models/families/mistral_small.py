"""A Mistral Small in both of the forms that its makers publish side by side: that of transformers, and their own, which vLLM prefers.

Both have the same weights and vocabulary; the makers' tokenizer writes conversations by code.
"""

import base64
import re

import transformers
from families import TinyModel
from families.pixtral import MERGE, MISTRAL_EDGE, MISTRAL_PATCH, MISTRAL_TEMPLATE, configs, make_processor
from published import WEIGHTS, write_json
from safetensors.torch import load_file, save_file
from sizes import TEXT, VISION
from vocabulary import TEKKEN_SPLIT, Vocabulary, bytes_of, tekken

# The order is fixed up to the tokenizer's version 7.
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

# From the names of transformers to Mistral's own.
NAMES = [
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
    words = Vocabulary(tokenizer, SPECIAL_TOKENS, MISTRAL_TEMPLATE, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    settings = configs(words, MISTRAL_EDGE, MISTRAL_PATCH)
    config = transformers.Mistral3Config(**settings, spatial_merge_size=MERGE, multimodal_projector_bias=False)
    processor = make_processor(words, MISTRAL_EDGE, MISTRAL_PATCH, spatial_merge_size=MERGE)

    def publish(directory):
        write_json(directory / "params.json", params(words, config))
        write_json(directory / "tekken.json", tekken_file(tokenizer))
        tensors = {own_name(name): tensor for name, tensor in load_file(directory / WEIGHTS).items()}
        save_file(tensors, directory / "consolidated.safetensors", metadata={"format": "pt"})
        (directory / "consolidated.safetensors").chmod(0o644)

    return TinyModel(transformers.Mistral3ForConditionalGeneration(config), processor, publish)


def own_name(name):
    for pattern, own in NAMES:
        name = re.sub(pattern, own, name)
    return name


def params(words, config):
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
        "vocab_size": words.size,
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
            "spatial_merge_size": MERGE,
            "add_pre_mm_projector_layer_norm": True,
            "image_token_id": words.ids["[IMG]"],
            "image_break_token_id": words.ids["[IMG_BREAK]"],
            "image_end_token_id": words.ids["[IMG_END]"],
        },
    }


def tekken_file(tokenizer):
    """Mistral's own file of the same vocabulary: special tokens first, then all others by the order of their merges."""
    words = sorted(tokenizer.get_vocab().items(), key=lambda word: word[1])[len(SPECIAL_TOKENS) :]
    return {
        "config": {
            "pattern": TEKKEN_SPLIT,
            "num_vocab_tokens": len(words),
            "default_vocab_size": len(words) + len(SPECIAL_TOKENS),
            "default_num_special_tokens": len(SPECIAL_TOKENS),
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(bytes_of(word)).decode(), "token_str": None}
            for rank, (word, _) in enumerate(words)
        ],
        "special_tokens": [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL_TOKENS)],
        "multimodal": {"image_patch_size": MISTRAL_PATCH, "max_image_size": MISTRAL_EDGE, "spatial_merge_size": MERGE},
    }
