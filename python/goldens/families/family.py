"""The description of an image family that make_family_goldens.py works through."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

# (width, height)
Size = tuple[int, int]
Trial = tuple[Size, dict]

# The sizes for a family's first model: tiny ones, strips, halves and neighbours of the usual
# squares, everyday sizes and extremes.
SIZES: list[Size] = [
    (1, 1), (2, 3), (1, 50), (50, 1), (3, 600), (600, 3), (17, 16),
    (224, 224), (336, 336), (448, 448), (896, 896), (335, 337), (337, 335), (336, 335), (672, 336),
    (336, 1008),
    (100, 100), (333, 517), (640, 480), (480, 640), (1001, 503), (1024, 768), (1920, 1080),
    (1080, 1920),
    (4000, 20), (20, 4000), (2600, 13),
]  # fmt: skip

# The sizes for models that change one setting.
FEW_SIZES: list[Size] = [(1, 1), (61, 83), (336, 336), (500, 337), (301, 700), (900, 60)]


def with_random_sizes(seed: str, count: int = 12, bits: float = 10.5) -> list[Size]:
    """Returns SIZES and `count` random sizes with sides of 4 to `2**bits` pixels."""
    rng = random.Random(f"sizes of {seed}")
    return SIZES + [
        (round(2 ** rng.uniform(2, bits)), round(2 ** rng.uniform(2, bits))) for _ in range(count)
    ]


def without_kwargs(sizes: list[Size]) -> list[Trial]:
    """Returns trials of the sizes without kwargs."""
    return [(size, {}) for size in sizes]


def with_changes(settings: dict, **changes) -> dict:
    """Returns the settings with changes; a change to `...` removes the key."""
    return {key: value for key, value in (settings | changes).items() if value is not ...}


@dataclass(frozen=True)
class Model:
    """One model directory and its trials."""

    # File name → JSON.
    files: dict[str, dict]
    # The special tokens of its tokenizer.
    vocabulary: dict[str, int]
    trials: list[Trial]
    # Added tokens that are not special (Gemma's line breaks).
    plain_tokens: tuple[str, ...] = ()
    # Merges of the byte-level vocabulary.
    merges: tuple[tuple[str, str], ...] = ()
    # Attributes of the tokenizer that the model's processor reads.
    tokenizer_settings: dict = field(default_factory=dict)
    # The parts of a placeholder that are plain text.
    texts: tuple[str, ...] = ()
    # Records the tensors in every floating-point type, and the raw bytes.
    full: bool = False


@dataclass(frozen=True)
class Family:
    """An image family: its models, and functions that know its arithmetic."""

    # The text that stands for an image in a prompt, before expansion.
    prompt: str
    models: dict[str, Model]
    # Returns True if vLLM's model takes the item; the arguments are config.json, the image's size
    # and the case. Some settings pass vLLM's processor and then crash its engine.
    engine_accepts: Callable[[dict, Size, dict], bool]
    # Returns the column names and the rows of plans.json.
    plans: Callable[[], tuple[list[str], list[list]]] | None = None
    # The prompts with several images for prompts.json: (model, text, sizes, kwargs).
    prompts: list[tuple[str, str, list[Size], dict]] = field(default_factory=list)
