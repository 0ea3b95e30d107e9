"""Tiny tokenizers with the markers of each format as added tokens.

The tokens are special if they are in the models with that format, because that changes the parser's
input: the detokenizer drops special tokens unless the parser requests them, and vLLM's engine
parsers drop special tokens that are no part of their format.
"""

import copy
import json
import re
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.utils.mistral import is_mistral_tokenizer

# Texts for merges across borders within a format, such as `":`, `">` and `}}`, as in large
# vocabularies.
CORPUS = [
    (
        '{"name": "get_weather", "arguments": {"city": "Hangzhou", "unit": "celsius"}}'
        ' [{"a": 1}, {"b": [1, 2]}]'
    ),
    (
        "<function=get_weather>\n<parameter=city>\nHangzhou\n</parameter>\n"
        '</function> <invoke name="now"></invoke>'
    ),
    (
        "[get_weather(city='Hangzhou', unit='celsius')] Let me look. Let me think. That is all. "
        "Hello, world. I write here."
    ),
    (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="set_values">\n'
        '<｜DSML｜parameter name="count" string="false">5</｜DSML｜parameter>\n'
    ),
    (
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls> function write_file(path, content): `json "
        "functions. parameters Paris true null string"
    ),
] * 4

THINK = ["<think>", "</think>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
DEEPSEEK_TURNS = ["<｜User｜>", "<｜Assistant｜>"]
DEEPSEEK_CALLS = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
]
KIMI_CALLS = [
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
]
GLM_TURNS = [
    "[gMASK]",
    "<sop>",
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
]
GEMMA_CHANNEL = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|tool_response>",
]

# name: (special tokens, other added tokens). No format uses the first special token.
ADDED_TOKENS = {
    "qwen3": (
        CHATML,
        ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", *THINK],
    ),
    "longcat": (CHATML, ["<longcat_tool_call>", "</longcat_tool_call>", *THINK]),
    "seed_oss": (
        ["<[PAD]>", "<seed:bos>", "<seed:eos>"],
        ["<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"],
    ),
    "deepseek_v3": (DEEPSEEK, [*DEEPSEEK_TURNS, *DEEPSEEK_CALLS, *THINK]),
    "deepseek_v32": (DEEPSEEK, [*DEEPSEEK_TURNS, "｜DSML｜", *THINK]),
    "kimi_k2": (["[BOS]", "[EOS]", "<|im_end|>"], [*KIMI_CALLS, *THINK]),
    "glm45": (
        GLM_TURNS,
        [
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            *THINK,
        ],
    ),
    "minimax_m2": (
        ["]!p~[", "]~b]", "[e~["],
        ["<minimax:tool_call>", "</minimax:tool_call>", *THINK],
    ),
    "gemma4": (["<bos>", *GEMMA_CHANNEL, "<|turn>", "<turn|>"], []),
    "functiongemma": (
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        ["<start_function_call>", "<end_function_call>", "<escape>"],
    ),
    "llama3": (["<|begin_of_text|>", "<|python_tag|>", "<|eom_id|>", "<|eot_id|>"], THINK),
    "llama4": (["<|begin_of_text|>", "<|python_start|>", "<|python_end|>", "<|eot|>"], []),
    "step3": (["<｜begin▁of▁sentence｜>", "<|EOT|>"], THINK),
    # A Mistral model before v11 and one after, each with the tokenizer of Hugging Face.
    "mistral_hf_v3": (["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"], []),
    "mistral_hf_v13": (
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
        [],
    ),
}
# Mistral's own tokenizers: the version in tekken.json, and the special tokens added since the tiny
# model's v7.
TEKKEN_VERSIONS = {
    "mistral_v11": ("v11", ["[CALL_ID]", "[ARGS]"]),
    "mistral_v13": ("v13", ["[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"]),
}


def build_hugging_face(special, plain):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # alphabet() is in hash order; sorting makes the ids the same in every run.
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[-1],
        extra_special_tokens=special[1:-1],
        clean_up_tokenization_spaces=False,
    )


def build_tekken(base, version, more):
    """Returns the tokenizer of the tiny model with tekken.json `base`, in another version."""
    file = copy.deepcopy(base)
    first = len(file["special_tokens"])
    file["special_tokens"] += [
        {"rank": first + at, "token_str": text, "is_control": True} for at, text in enumerate(more)
    ]
    count = len(file["special_tokens"])
    file["config"] |= {
        "version": version,
        "default_num_special_tokens": count,
        "default_vocab_size": file["config"]["num_vocab_tokens"] + count,
    }
    # Newer versions have another name for this key, and text does not need it.
    file.pop("multimodal")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tekken.json").write_text(json.dumps(file))
        return MistralTokenizer.from_pretrained(directory)


def build(mistral):
    """Returns all tokenizers by name. `mistral` is the directory of a tiny Mistral model."""
    base = json.loads((mistral / "tekken.json").read_text())
    return {name: build_hugging_face(*added) for name, added in ADDED_TOKENS.items()} | {
        name: build_tekken(base, *how) for name, how in TEKKEN_VERSIONS.items()
    }


def describe(name, tokenizer):
    """Returns a tokenizer's description in the goldens: its special and its other added tokens."""
    special = list(ADDED_TOKENS[name][0] if name in ADDED_TOKENS else tokenizer.all_special_tokens)
    return {
        "special": special,
        "added": list(ADDED_TOKENS[name][1]) if name in ADDED_TOKENS else [],
        "mistral": is_mistral_tokenizer(tokenizer),
    }


def encode(tokenizer, text):
    if not is_mistral_tokenizer(tokenizer):
        return tokenizer.encode(text, add_special_tokens=False)
    # Mistral's tokenizer never encodes text as a special token.
    pieces = re.split("(" + "|".join(map(re.escape, tokenizer.all_special_tokens)) + ")", text)
    vocabulary = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids))
    ids = []
    for piece in pieces:
        ids += (
            [vocabulary[piece]]
            if piece in vocabulary
            else tokenizer.encode(piece, add_special_tokens=False)
        )
    return ids


def token_texts(tokenizer, ids):
    """Returns the text of each token; tokens with parts of one character are joined."""
    texts = []
    part = []
    for id in ids:
        part.append(id)
        text = tokenizer.decode(part, skip_special_tokens=False)
        if not text.endswith("\ufffd"):
            texts.append(text)
            part = []
    assert not part, "the text of a case has whole characters"
    return texts


def detokenize(tokenizer, texts, skip_special):
    """Returns the detokenizer's text of these tokens."""
    if not skip_special:
        return "".join(texts)
    # Mistral's tokenizers keep these regardless of the request.
    kept = (
        {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"}
        if is_mistral_tokenizer(tokenizer)
        else set()
    )
    hidden = set(tokenizer.all_special_tokens) - kept
    return "".join(text for text in texts if text not in hidden)
