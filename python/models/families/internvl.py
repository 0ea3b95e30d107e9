"""InternVL 3 in the form of transformers, and in OpenGVLab's form.

vLLM calls the latter `InternVLChatModel`. It has the same parts and is made from the former, with
other names, other files and its own weights.
"""

import re
import shutil
from pathlib import Path

import torch
import transformers
from families import TinyModel
from published import rewrite_weights, write_json
from sizes import TEXT, VISION
from vocabulary import QWEN_SPLIT, Vocabulary, byte_level

# Published: 448 pixels, which are 256 tokens per tile. Here: 8×8 patches, four per token.
IMAGE_SIZE = 112
PATCH_SIZE = 14
DOWNSAMPLE_RATIO = 0.5
TOKENS_PER_TILE = 16
MAX_TILES = 12
VISION_LAYERS = VISION["num_hidden_layers"]

QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>"]
IMAGE_TOKENS = ["<img>", "</img>", "<IMG_CONTEXT>"]
# Neither vocabulary has a token for <image>, which prompts in OpenGVLab's form contain as plain
# text. A merge of ">" and a newline makes its tokens depend on the next character, as in the
# published vocabulary.
MORE_TEXT = ["<image>\nwhat is in <image>\n and <image>\n?"]

# Like the published template: content is a string or parts.
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{ '<IMG_CONTEXT>\\n' }}
{%- elif part['type'] == 'video' -%}
{{ '<video>\\n' }}
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

# Like OpenGVLab's: content is a string.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def vocabulary(template, special, **names):
    tokenizer = byte_level(special, split=QWEN_SPLIT, more_text=MORE_TEXT)
    return Vocabulary(
        tokenizer, special, template, eos_token="<|im_end|>", pad_token="<|endoftext|>", **names
    )


def processor_tokens(video):
    """Returns the names by which the processor of transformers finds its tokens."""
    return {
        "extra_special_tokens": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": video,
        }
    }


def text_config(vocab):
    return {
        **TEXT,
        "model_type": "qwen2",
        "vocab_size": vocab.size,
        "bos_token_id": vocab.ids["<|endoftext|>"],
        "eos_token_id": vocab.ids["<|im_end|>"],
    }


def tiny_internvl(vocab):
    config = transformers.InternVLConfig(
        text_config=text_config(vocab),
        vision_config={
            **VISION,
            "attention_bias": True,
            "image_size": [IMAGE_SIZE, IMAGE_SIZE],
            "patch_size": [PATCH_SIZE, PATCH_SIZE],
        },
        image_token_id=vocab.ids["<IMG_CONTEXT>"],
        image_seq_length=TOKENS_PER_TILE,
        downsample_ratio=DOWNSAMPLE_RATIO,
        tie_word_embeddings=False,
    )
    image_processor = transformers.GotOcr2ImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        # The processor turns this on, as for the published models, which also have it off.
        crop_to_patches=False,
        min_patches=1,
        max_patches=MAX_TILES,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )
    processor = transformers.InternVLProcessor(
        image_processor=image_processor,
        tokenizer=vocab.tokenizer,
        video_processor=transformers.InternVLVideoProcessor(
            size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
        ),
        image_seq_length=TOKENS_PER_TILE,
        chat_template=vocab.tokenizer.chat_template,
    )
    return TinyModel(transformers.InternVLForConditionalGeneration(config), processor)


def make_internvl():
    special = [*QWEN_TOKENS, *IMAGE_TOKENS, "<video>"]
    return tiny_internvl(vocabulary(TEMPLATE, special, **processor_tokens("<video>")))


def make_internvl_chat():
    special = [*QWEN_TOKENS, *IMAGE_TOKENS]
    tiny = tiny_internvl(vocabulary(TEMPLATE, special, **processor_tokens("<|video_pad|>")))

    def publish(directory):
        for file in directory.glob("*.json"):
            file.unlink()
        vocab = vocabulary(CHAT_TEMPLATE, special)
        vocab.tokenizer.save_pretrained(directory)
        rewrite_weights(directory, chat_weights)
        write_json(directory / "config.json", chat_config(vocab))
        write_json(directory / "preprocessor_config.json", chat_preprocessor())
        shutil.copyfile(
            Path(__file__).with_name("internvl_chat_configuration.py"),
            directory / "configuration_internvl_chat.py",
        )

    tiny.publish = publish
    return tiny


def chat_config(vocab):
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "model_type": "internvl_chat",
        "downsample_ratio": DOWNSAMPLE_RATIO,
        "dynamic_image_size": True,
        "force_image_size": IMAGE_SIZE,
        "llm_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "tie_word_embeddings": False,
            **text_config(vocab),
        },
        "max_dynamic_patch": MAX_TILES,
        "min_dynamic_patch": 1,
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "tie_word_embeddings": False,
        "use_thumbnail": True,
        "vision_config": {
            **VISION,
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            "hidden_act": "gelu",
            "image_size": IMAGE_SIZE,
            "initializer_factor": 0.1,
            "layer_norm_eps": 1e-6,
            "norm_type": "layer_norm",
            "num_channels": 3,
            "patch_size": PATCH_SIZE,
            "qk_normalization": False,
            "qkv_bias": True,
        },
    }


def chat_preprocessor():
    """Returns the settings as published.

    The settings of CLIP are not used: the tiles follow from the model's configuration.
    """
    return {
        "crop_size": IMAGE_SIZE,
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor",
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "resample": 3,
        "size": IMAGE_SIZE,
    }


# Replacements from the names in transformers to the published ones, applied in this order.
CHAT_NAMES = [
    (r"^vision_tower\.embeddings\.cls_token$", "vision_model.embeddings.class_embedding"),
    (
        r"^vision_tower\.embeddings\.patch_embeddings\.projection\.",
        "vision_model.embeddings.patch_embedding.",
    ),
    (
        r"^vision_tower\.embeddings\.position_embeddings$",
        "vision_model.embeddings.position_embedding",
    ),
    (r"^vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.lambda_([12])$", r".ls\1"),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^multi_modal_projector\.linear_2\.", "mlp1.3."),
]


def chat_weights(saved):
    """Returns the weights under published names; each vision layer joins query, key and value."""
    tensors = dict(saved)
    for layer in range(VISION_LAYERS):
        for kind in ("weight", "bias"):
            parts = [
                f"vision_tower.encoder.layer.{layer}.attention.{part}_proj.{kind}" for part in "qkv"
            ]
            joined = torch.cat([tensors.pop(part) for part in parts])
            tensors[f"vision_model.encoder.layers.{layer}.attn.qkv.{kind}"] = joined
    return {chat_name(name): tensor for name, tensor in tensors.items()}


def chat_name(name):
    for pattern, published in CHAT_NAMES:
        name = re.sub(pattern, published, name)
    return name
