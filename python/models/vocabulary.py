"""Tiny tokenizers of the kinds that the families use. A vocabulary is a function of this file alone."""

import json

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# A few merges over the alphabet are enough: tests care about borders between tokens, not about compression.
CORPUS = [
    "what is in this picture? compare the images and say which of them shows the red square on a blue ground.",
    "describe the first image, then the second image, then tell me how they differ in colour and in size.",
    "the system, the user and the assistant take turns; an answer is short, true and in plain words.",
]
ROUNDS = 8
# How Qwen2 splits text before BPE; transformers has the same in its Qwen2Tokenizer.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Qwen3.5 counts combining marks with the letters. transformers builds its tokenizer with this split whatever
# tokenizer.json says, so the file has to say the same.
QWEN35_SPLIT = QWEN_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")
# How Mistral's Tekken splits text.
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Vocabulary:
    """A tokenizer for transformers, the id of each of its special tokens and the number of all its tokens."""

    def __init__(self, tokenizer, special, template, **names):
        self.ids = {token: tokenizer.token_to_id(token) for token in special}
        self.size = tokenizer.get_vocab_size()
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
        self.tokenizer.chat_template = template


def byte_level(special, split=None, bos=None, more_text=()):
    """BPE over bytes, as GPT-2, Qwen2, Llama 3 and Mistral's Tekken have it; `bos` is put first where it is given."""
    tokenizer = Tokenizer(models.BPE())
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.normalizer = normalizers.NFC()
        pieces = pre_tokenizers.Split(Regex(split), "isolated")
        bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_of_pieces])
    tokenizer.decoder = decoders.ByteLevel()
    # alphabet() comes in hash order; sorted, the ids are the same in every run.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=448, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, *more_text] * ROUNDS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    if bos is not None:
        put_first(tokenizer, bos)
    return tokenizer


def tekken(special, bos):
    """BPE over bytes as Mistral's Tekken has it: special tokens first, then the bytes in their order, then what they merge to."""
    merges = [tuple(merge) for merge in json.loads(byte_level([], TEKKEN_SPLIT).to_str())["model"]["merges"]]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=bytes_of)
    words = [*special, *letters, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    pieces = pre_tokenizers.Split(Regex(TEKKEN_SPLIT), "isolated")
    bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_of_pieces])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    put_first(tokenizer, bos)
    return tokenizer


def bytes_of(word):
    """The bytes of a word over the alphabet of byte-level BPE: what can be printed stands for itself, the rest comes behind it in order."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): byte for byte in printed} | {chr(256 + number): byte for number, byte in enumerate(others)}
    return bytes(letters[letter] for letter in word)


def byte_fallback(special, bos, prefix_space, plain=()):
    """BPE over characters with `▁` for a space and byte tokens for what it lacks, as Llama 2 and Gemma have it.

    `plain`: added tokens that are found before BPE but are text, not markers, like Gemma's runs of newlines.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix_space else spaces
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * ROUNDS, trainer)
    # The byte tokens were special for the trainer alone, so that it has all of them.
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    put_first(tokenizer, bos)
    return tokenizer


def put_first(tokenizer, bos):
    ids = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=ids
    )
