"""Weights derived from the parameters' names, independent of torch's version and the CPU."""

import hashlib
import math

import numpy as np
import torch

# Large weights over small embeddings make the layers outweigh the input token.
WEIGHT_DEVIATION = 0.2
EMBEDDING_DEVIATION = 0.02
# For models that normalize their queries. At scale 1 attention is nearly flat and answers loop.
QUERY_NORM_SCALE = 4.0
# The logarithm of the decay rate of linear attention: low enough to remember an image until the
# answer.
LOG_DECAY_RATE = -4.0
# Vectors that represent features, unlike scales and biases.
FEATURE_VECTORS = ("class_embedding", "image_newline")


def set_weights(family, model):
    """Sets uniform matrices, seeded by name, scales of 1 and biases of 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 and not name.endswith(FEATURE_VECTORS):
            parameter.data.fill_(vector_value(name))
            continue
        deviation = EMBEDDING_DEVIATION if "embed_tokens" in name else WEIGHT_DEVIATION
        parameter.data.copy_(matrix(f"{family}/{name}", tuple(parameter.shape), deviation))


def matrix(name, shape, deviation):
    """Returns a uniform matrix of this standard deviation, seeded by its name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    steps = np.random.Generator(np.random.PCG64(seed)).integers(-(2**15), 2**15, size=shape)
    # A uniform distribution over ±a has the standard deviation a/√3.
    scale = np.float32(deviation * math.sqrt(3) / 2**15)
    return torch.from_numpy(steps.astype(np.float32) * scale)


def vector_value(name):
    """Returns the value of all elements of a scale or bias."""
    if name.endswith("bias"):
        return 0.0
    if name.endswith("A_log"):
        return LOG_DECAY_RATE
    return QUERY_NORM_SCALE if "q_norm" in name else 1.0
