"""Answers decoded token by token with vLLM's own detokenizer.

They include random tokens, incomplete characters and stop strings.
"""

import random
from types import SimpleNamespace

from vllm import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

ANSWER_TEXTS = [
    "Hello, world!",
    "naïve café 北京 👩‍👩‍👧 🇩🇪",
    "  two  spaces\n\n\ttab ",
    "a<|im_end|>b</s>c",
    "e\u0301 ﬁ \ufffd x \ufffd",
    "🙂" * 3,
]
STOP_STRINGS = [
    ["\n\n"],
    ["o w", "lo"],
    ["é"],
    ["京", " "],
    ["zzz", "🙂🙂"],
    ["d", "ld"],
    ["\ufffd"],
    ["ab", "b", "abc"],
]


def make_detokenizer(tokenizer, prompt, **params):
    request = SimpleNamespace(
        request_id="r",
        prompt_token_ids=prompt,
        prompt_embeds=None,
        sampling_params=SamplingParams(**params),
    )
    return FastIncrementalDetokenizer(tokenizer, request)


def deltas(tokenizer, prompt, tokens, skip_special):
    """Returns the text that each token adds."""
    detokenizer = make_detokenizer(tokenizer, prompt, skip_special_tokens=skip_special)
    return [detokenizer.decode_next(token) for token in tokens]


def decode_until_stop(tokenizer, prompt, tokens, stop, include, min_tokens):
    """Returns the stop string that ends the answer, or None, and the text."""
    detokenizer = make_detokenizer(
        tokenizer, prompt, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    for token in tokens:
        found = detokenizer.update([token], False)
        if found is not None:
            return found, detokenizer.get_next_output_text(True, False)
    return None, detokenizer.get_next_output_text(True, False)


def cases(tokenizer, seed):
    """Returns the answers of one tokenizer with their texts."""
    rng = random.Random(seed)
    vocabulary = sorted(tokenizer.get_vocab().values())
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    answers = [encode(text) for text in ANSWER_TEXTS]
    answers += [[rng.choice(vocabulary) for _ in range(rng.randint(1, 24))] for _ in range(24)]
    # Random bytes, for incomplete and invalid characters.
    answers += [
        [token for byte in rng.randbytes(12) for token in encode(bytes([byte]).decode("latin-1"))]
        for _ in range(4)
    ]
    answers += [
        encode("🙂")[:-1],
        encode("🙂")[:-1] + encode("x"),
        encode("🙂")[1:],
        encode("é")[:-1] * 3,
    ]
    prompts = [encode("the"), encode("What? 👩‍👩‍👧\n") * 20]
    results = []
    for answer in answers:
        prompt = rng.choice(prompts)
        skip = rng.random() < 0.7
        results.append(
            dict(
                prompt=prompt,
                tokens=answer,
                skip_special=skip,
                deltas=deltas(tokenizer, prompt, answer, skip),
            )
        )
    for text in ANSWER_TEXTS + ["abcab", "ab lo w zzz"]:
        for stop in STOP_STRINGS:
            prompt = prompts[0]
            answer = encode(text)
            include = rng.random() < 0.5
            min_tokens = rng.choice([0, 0, 2, 5])
            found, result = decode_until_stop(tokenizer, prompt, answer, stop, include, min_tokens)
            results.append(
                dict(
                    prompt=prompt,
                    tokens=answer,
                    stop=stop,
                    include=include,
                    min_tokens=min_tokens,
                    found=found,
                    text=result,
                )
            )
    return results
