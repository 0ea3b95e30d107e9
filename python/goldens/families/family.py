"""What a family's module hands to make_family_goldens.py."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

# (width, height)
Size = tuple[int, int]
Trial = tuple[Size, dict]

# Tiny, strips, halves and neighbours of the usual squares, everyday sizes, extremes: for a family's first model.
SIZES: list[Size] = [
    (1, 1), (2, 3), (1, 50), (50, 1), (3, 600), (600, 3), (17, 16),
    (224, 224), (336, 336), (448, 448), (896, 896), (335, 337), (337, 335), (336, 335), (672, 336), (336, 1008),
    (100, 100), (333, 517), (640, 480), (480, 640), (1001, 503), (1024, 768), (1920, 1080), (1080, 1920),
    (4000, 20), (20, 4000), (2600, 13),
]  # fmt: skip

# For the models that change one setting.
FEW: list[Size] = [(1, 1), (61, 83), (336, 336), (500, 337), (301, 700), (900, 60)]


def with_random(seed: str, count: int = 12, bits: float = 10.5) -> list[Size]:
    """SIZES and some random ones."""
    rng = random.Random(f"sizes of {seed}")
    return SIZES + [(round(2 ** rng.uniform(2, bits)), round(2 ** rng.uniform(2, bits))) for _ in range(count)]


def plain(sizes: list[Size]) -> list[Trial]:
    """The sizes without kwargs."""
    return [(size, {}) for size in sizes]


def changed(settings: dict, **changes) -> dict:
    """Settings with changes; a change to `...` removes the key."""
    return {key: value for key, value in (settings | changes).items() if value is not ...}


@dataclass(frozen=True)
class Model:
    """One model directory and what is tried with it."""

    # File name → JSON.
    files: dict[str, dict]
    # The special tokens of its tokenizer.
    vocabulary: dict[str, int]
    trials: list[Trial]
    # Tokens that are found in text without being special (Gemma's line breaks).
    plain_tokens: tuple[str, ...] = ()
    # Pairs of byte-level tokens that become one.
    merges: tuple[tuple[str, str], ...] = ()
    # Attributes of the tokenizer that its processor reads.
    tokenizer_settings: dict = field(default_factory=dict)
    # Texts that the placeholder holds beside special tokens.
    texts: tuple[str, ...] = ()
    # Whether every type is recorded, and bytes.
    full: bool = False


@dataclass(frozen=True)
class Family:
    # What stands for an image in a prompt, before expansion.
    prompt: str
    models: dict[str, Model]
    # Whether vLLM's model would take the item (config.json, image's size, case): some settings pass its processor and
    # end its engine.
    fits: Callable[[dict, Size, dict], bool]
    # Column names and rows of plans.json.
    plans: Callable[[], tuple[list[str], list[list]]] | None = None
    # Texts with several images, for prompts.json: (model, text, sizes, kwargs).
    prompts: list[tuple[str, str, list[Size], dict]] = field(default_factory=list)
