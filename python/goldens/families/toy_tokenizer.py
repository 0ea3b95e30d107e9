"""A tokenizer with the published ids of a model's special tokens, and one token per other byte."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def write(
    directory: Path,
    special: dict[str, int],
    plain: tuple[str, ...],
    merges: tuple[tuple[str, str], ...],
    settings: dict,
) -> None:
    """Saves the tokenizer into a model directory."""
    # Bytes and merges get the free ids from 300 on. The vocabulary then has holes, as some
    # published ones do.
    taken = set(special.values())
    free = (number for number in range(300, 10**6) if number not in taken)
    vocabulary = {
        byte: next(free) for byte in sorted(pre_tokenizers.ByteLevel.alphabet())
    } | special
    vocabulary |= {first + second: next(free) for first, second in merges}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in special if token not in plain]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    for token, number in special.items():
        assert tokenizer.token_to_id(token) == number, token
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
