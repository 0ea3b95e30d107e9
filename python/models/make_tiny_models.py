#!/usr/bin/env python3
"""Makes one tiny random model of each vision family that the real-engine tests run.

usage: make_tiny_models.py OUT_DIR

Writes OUT_DIR/{qwen2vl,qwen25vl,qwen3vl}: complete model directories in the layout that transformers saves today, a few
MB each, quick on a CPU. The weights are a function of the parameter's name alone (seeded integers, scaled by exact float
arithmetic), so every machine and every run makes the same bytes.

The last step checks what the tests rest on: that greedy answers depend on the text and on the pixels. Plain random
initialisation fails that, such a model repeats one token whatever it is asked.
"""

import hashlib
import math
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

# Head width 64: vLLM's CPU attention wants 32 or more. Two heads over one key head also exercises grouped queries.
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}
VISION_HIDDEN = 64

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

# A few merges over the byte alphabet are enough: tests care about borders between tokens, not about compression.
CORPUS = [
    "what is in this picture? compare the images and say which of them shows the red square on a blue ground.",
    "describe the first image, then the second image, then tell me how they differ in colour and in size.",
    "the system, the user and the assistant take turns; an answer is short, true and in plain words.",
]

CHAT_TEMPLATE = """\
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
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

# Weights this large, over embeddings this small, make the layers outweigh the token that they start from.
WEIGHT_DEVIATION = 0.2
EMBEDDING_DEVIATION = 0.02
# Qwen3 normalises its queries. At scale 1 attention stays nearly flat and answers run into loops.
QUERY_NORM = 4.0


def make_tokenizer():
    """A byte-level BPE tokenizer with Qwen's special tokens, and the id of each of these."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # alphabet() comes in hash order; sorted, the ids are the same in every run.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=448, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 8, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast, ids, tokenizer.get_vocab_size()


def text_config(ids, vocabulary, rope, **more):
    return {
        **TEXT,
        "vocab_size": vocabulary,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        **more,
    }


def marker_ids(ids):
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def make_qwen2vl(tokenizer, ids, vocabulary):
    config = transformers.Qwen2VLConfig(
        text_config=text_config(ids, vocabulary, {"type": "mrope", "mrope_section": [8, 12, 12]}),
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
        **marker_ids(ids),
    )
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    return transformers.Qwen2VLForConditionalGeneration(config), processor


def make_qwen25vl(tokenizer, ids, vocabulary):
    config = transformers.Qwen2_5_VLConfig(
        text_config=text_config(ids, vocabulary, {"type": "mrope", "mrope_section": [8, 12, 12]}),
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
        **marker_ids(ids),
    )
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


def make_qwen3vl(tokenizer, ids, vocabulary):
    rope = {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        text_config=text_config(ids, vocabulary, rope, head_dim=64),
        vision_config={
            "depth": 3,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            "out_hidden_size": TEXT["hidden_size"],
        },
        **marker_ids(ids),
    )
    # As the published Qwen3-VL models set it: other patches, other limits, other normalisation than Qwen2-VL.
    image_processor = transformers.Qwen2VLImageProcessor(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    processor = transformers.Qwen3VLProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    return transformers.Qwen3VLForConditionalGeneration(config), processor


FAMILIES = {"qwen2vl": make_qwen2vl, "qwen25vl": make_qwen25vl, "qwen3vl": make_qwen3vl}


def set_weights(family, model):
    """Uniform weights, seeded by name: neither torch's version nor the CPU's vector width changes them."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            norm = QUERY_NORM if "q_norm" in name else 1.0
            parameter.data.fill_(0.0 if name.endswith("bias") else norm)
            continue
        seed = int.from_bytes(hashlib.sha256(f"{family}/{name}".encode()).digest()[:8], "little")
        steps = np.random.Generator(np.random.PCG64(seed)).integers(-(2**15), 2**15, size=tuple(parameter.shape))
        deviation = EMBEDDING_DEVIATION if "embed_tokens" in name else WEIGHT_DEVIATION
        # A uniform distribution over ±a has deviation a/√3.
        scale = np.float32(deviation * math.sqrt(3) / 2**15)
        parameter.data.copy_(torch.from_numpy(steps.astype(np.float32) * scale))


def check_answers(family, model, processor):
    """Greedy answers must differ with the text and with the image, or the tests on top of them prove nothing."""

    def answer(text, image=None):
        content = [{"type": "text", "text": text}]
        if image is not None:
            content.insert(0, {"type": "image"})
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=[prompt], images=None if image is None else [image], return_tensors="pt")
        with torch.no_grad():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=12, min_new_tokens=12)
        return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())

    noise = np.random.Generator(np.random.PCG64(7)).integers(0, 256, size=(2, 224, 280, 3), dtype=np.uint8)
    answers = {
        "a text": answer("what is this?"),
        "another text": answer("compare the images"),
        "an image": answer("what is this?", noise[0]),
        "another image": answer("what is this?", noise[1]),
        "a grey image": answer("what is this?", np.full((224, 280, 3), 128, dtype=np.uint8)),
    }
    for name, tokens in answers.items():
        print(f"  {family}: {name}: {' '.join(map(str, tokens))}")
    if len(set(answers.values())) < len(answers):
        sys.exit(f"{family}: two different prompts get the same answer")
    if any(len(set(tokens)) < 3 for tokens in answers.values()):
        sys.exit(f"{family}: an answer repeats itself")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    tokenizer, ids, vocabulary = make_tokenizer()
    for family, make in FAMILIES.items():
        model, processor = make(tokenizer, ids, vocabulary)
        model = model.to(torch.float32).eval()
        set_weights(family, model)
        directory = out / family
        directory.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        processor.save_pretrained(directory)
        # Without it engines keep their own sampling defaults, and nothing but the request decides.
        (directory / "generation_config.json").unlink(missing_ok=True)
        size = sum(file.stat().st_size for file in directory.iterdir())
        print(f"{family}: {size / 1e6:.1f} MB in {directory}")
        check_answers(family, model, processor)


if __name__ == "__main__":
    main()
