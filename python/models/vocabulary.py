"""Tiny tokenizers of the families' kinds. The vocabularies depend on this file only."""

import json

import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

# A few merges are enough: the tests depend on borders between tokens, not on compression.
CORPUS = [
    "what is in this picture? compare the images and say which of them shows the red square "
    "on a blue ground.",
    "describe the first image, then the second image, then tell me how they differ in colour "
    "and in size.",
    "the system, the user and the assistant take turns; an answer is short, true "
    "and in plain words.",
]
# The number of times that the trainer reads the corpus.
CORPUS_REPEATS = 8
# Qwen2's split of text before BPE, the same as in Qwen2Tokenizer of transformers.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen3.5 treats combining marks as letters. transformers builds its tokenizer with this split and
# ignores the split in tokenizer.json, so the file must have the same one.
QWEN35_SPLIT = QWEN_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}"
)
# The split of Mistral's Tekken.
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Vocabulary:
    """A tokenizer for transformers, with its size and the ids of its special tokens."""

    def __init__(self, tokenizer, special, template, **names):
        self.ids = {token: tokenizer.token_to_id(token) for token in special}
        self.size = tokenizer.get_vocab_size()
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
        self.tokenizer.chat_template = template


def byte_level(special, split=None, bos=None, more_text=()):
    """Returns a tokenizer with BPE over bytes, as in GPT-2, Qwen2, Llama 3 and Mistral's Tekken.

    It prepends `bos` to texts, if given.
    """
    tokenizer = Tokenizer(models.BPE())
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.normalizer = normalizers.NFC()
        pieces = pre_tokenizers.Split(Regex(split), "isolated")
        bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_of_pieces])
    tokenizer.decoder = decoders.ByteLevel()
    # alphabet() is in hash order; sorting makes the ids the same in every run.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=448, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, *more_text] * CORPUS_REPEATS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    if bos is not None:
        prepend_bos(tokenizer, bos)
    return tokenizer


def tekken(special, bos):
    """Returns a tokenizer with BPE over bytes and the order of ids of Mistral's Tekken.

    Special tokens come first, then the bytes in ascending order, then the merges.
    """
    merges = [
        tuple(merge)
        for merge in json.loads(byte_level([], TEKKEN_SPLIT).to_str())["model"]["merges"]
    ]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=token_bytes)
    words = [*special, *letters, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    pieces = pre_tokenizers.Split(Regex(TEKKEN_SPLIT), "isolated")
    bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_of_pieces])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    prepend_bos(tokenizer, bos)
    return tokenizer


def token_bytes(word):
    """Returns the bytes of a token in the alphabet of byte-level BPE.

    Printable bytes are represented by themselves, the others by the characters from U+0100 on, in
    order.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): byte for byte in printed} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
    return bytes(letters[letter] for letter in word)


def byte_fallback(special, bos, prefix_space, plain_tokens=()):
    """Returns a tokenizer with BPE over characters and byte fallback, as in Llama 2 and Gemma.

    `▁` stands for a space, and byte tokens for missing characters. `plain_tokens` are added tokens
    that match before BPE and are not special, like Gemma's runs of newlines.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix_space else spaces
    )
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * CORPUS_REPEATS, trainer)
    # The byte tokens were special for the trainer only, so that the vocabulary has all of them.
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in plain_tokens]
    )
    prepend_bos(tokenizer, bos)
    return tokenizer


def prepend_bos(tokenizer, bos):
    """Makes the tokenizer prepend `bos` to every text."""
    ids = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=ids
    )
