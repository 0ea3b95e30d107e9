"""Conversions from transformers' saved form to the published form, which vLLM's loader requires."""

import json
import os

from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def rewrite_weights(directory, change):
    """Rewrites the weights; `change` maps a dictionary of tensors by name to another one."""
    path = directory / WEIGHTS
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    # save_file makes the file readable for its owner only.
    os.chmod(path, 0o644)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def nest_vision_model(directory):
    """Nests the vision tower's weights one level deeper.

    Published CLIP and SigLIP towers have one more level of modules than transformers 5 saves.
    """

    def published_name(name):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)

    rewrite_weights(
        directory,
        lambda tensors: {published_name(name): tensor for name, tensor in tensors.items()},
    )


def transpose_experts(directory):
    """Transposes Qwen3-VL's experts to input × output, as published.

    transformers 5 saves output × input.
    """

    def transpose_expert(name, tensor):
        return tensor.transpose(1, 2) if ".mlp.experts." in name else tensor

    rewrite_weights(
        directory,
        lambda tensors: {name: transpose_expert(name, tensor) for name, tensor in tensors.items()},
    )
