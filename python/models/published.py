"""From what transformers saves to what is published, where vLLM's loader knows the published form alone."""

import json
import os

from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def rewrite_weights(directory, change):
    """Replaces the file of weights; `change` maps a dict of tensors by name to another."""
    path = directory / WEIGHTS
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    # save_file leaves the file to its owner alone.
    os.chmod(path, 0o644)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def nest_vision_model(directory):
    """Published CLIP and SigLIP towers have one level of modules more than transformers 5 saves."""

    def name(saved):
        return saved.replace("vision_tower.", "vision_tower.vision_model.", 1)

    rewrite_weights(directory, lambda tensors: {name(saved): tensor for saved, tensor in tensors.items()})


def transpose_experts(directory):
    """Published experts of Qwen3-VL lie as input × output, what transformers 5 saves as output × input."""

    def turned(name, tensor):
        return tensor.transpose(1, 2) if ".mlp.experts." in name else tensor

    rewrite_weights(directory, lambda tensors: {name: turned(name, tensor) for name, tensor in tensors.items()})
