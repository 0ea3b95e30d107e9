"""Weights as a function of the parameter's name: neither torch's version nor the CPU's vector width changes them."""

import hashlib
import math

import numpy as np
import torch

# Weights this large, over embeddings this small, make the layers outweigh the token that they start from.
WEIGHT_DEVIATION = 0.2
EMBEDDING_DEVIATION = 0.02
# Some models normalise their queries. At scale 1 attention stays nearly flat and answers run into loops.
QUERY_NORM = 4.0
# Logarithm of how fast a layer of linear attention forgets: an image has to last until the answer.
FORGETTING = -4.0
# Vectors that stand for something seen, unlike scales and biases.
VECTORS = ("class_embedding", "image_newline")


def set_weights(family, model):
    """Uniform matrices, seeded by name; scales 1, biases 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 and not name.endswith(VECTORS):
            parameter.data.fill_(vector_value(name))
            continue
        deviation = EMBEDDING_DEVIATION if "embed_tokens" in name else WEIGHT_DEVIATION
        parameter.data.copy_(matrix(f"{family}/{name}", tuple(parameter.shape), deviation))


def matrix(name, shape, deviation):
    """A uniform matrix of this deviation, seeded by its name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    steps = np.random.Generator(np.random.PCG64(seed)).integers(-(2**15), 2**15, size=shape)
    # A uniform distribution over ±a has deviation a/√3.
    scale = np.float32(deviation * math.sqrt(3) / 2**15)
    return torch.from_numpy(steps.astype(np.float32) * scale)


def vector_value(name):
    if name.endswith("bias"):
        return 0.0
    if name.endswith("A_log"):
        return FORGETTING
    return QUERY_NORM if "q_norm" in name else 1.0
