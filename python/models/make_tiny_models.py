#!/usr/bin/env python3
"""Makes a tiny random model of each family for the tests with real engines.

usage: make_tiny_models.py OUT_DIR [NAME...]

Writes OUT_DIR/NAME for each named family, or for all, and OUT_DIR/NAME-lora-LETTER for families
with LoRA adapters. These are complete model directories in the layout of today's transformers; they
have a few MB each and run fast on a CPU. The bytes are the same on every machine and in every run.
Token counts and layouts follow from the same settings as in the published models. Sizes in pixels
are smaller where the family allows it.
"""

import sys
from pathlib import Path

import torch
from adapters import make_adapters
from answers import check_answers
from families import (
    gemma3,
    internvl,
    llama4,
    llava,
    llava_onevision,
    minicpmv,
    mistral_small,
    paligemma,
    pixtral,
    qwen,
    qwen2_audio,
    qwen_omni,
)
from weights import set_weights

FAMILIES = {
    "qwen2vl": qwen.make_qwen2vl,
    "qwen25vl": qwen.make_qwen25vl,
    "qwen3vl": qwen.make_qwen3vl,
    "llava": llava.make_llava,
    "llava_next": llava.make_llava_next,
    "gemma3": gemma3.make_gemma3,
    "llama4": llama4.make_llama4,
    "pixtral": pixtral.make_pixtral,
    "mistral3": pixtral.make_mistral3,
    "internvl": internvl.make_internvl,
    "internvl_chat": internvl.make_internvl_chat,
    "qwen3vl_moe": qwen.make_qwen3vl_moe,
    "qwen35": qwen.make_qwen35,
    "qwen2audio": qwen2_audio.make_qwen2audio,
    "omni": qwen_omni.make_omni,
    "llavaov": llava_onevision.make_llavaov,
    "paligemma": paligemma.make_paligemma,
    "minicpmv46": minicpmv.make_minicpmv46,
    "mistral_small": mistral_small.make_mistral_small,
}


def make_model(name, directory):
    """Writes the model of a family and its adapters, and checks the model's answers."""
    tiny = FAMILIES[name]()
    model = tiny.model.to(torch.float32).eval()
    set_weights(name, model)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tiny.processor.tokenizer.save_pretrained(directory)
    tiny.processor.save_pretrained(directory)
    # Without this file engines use their own sampling defaults, so only the request has an effect.
    (directory / "generation_config.json").unlink(missing_ok=True)
    if tiny.publish is not None:
        tiny.publish(directory)
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{name}: {size / 1e6:.1f} MB in {directory}")
    check_answers(name, model, tiny.processor, tiny.media)
    make_adapters(name, model, directory.parent)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    names = sys.argv[2:] or list(FAMILIES)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        sys.exit(f"unknown: {' '.join(unknown)}; the families are {' '.join(FAMILIES)}")
    for name in names:
        make_model(name, Path(sys.argv[1]) / name)


if __name__ == "__main__":
    main()
