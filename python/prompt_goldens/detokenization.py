"""Answers token by token, through vLLM's own detokenizer: random ones, ones that cut characters, and stop strings."""
import random
from types import SimpleNamespace

from vllm import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

TEXTS = ["Hello, world!", "naïve café 北京 👩‍👩‍👧 🇩🇪", "  two  spaces\n\n\ttab ", "a<|im_end|>b</s>c", "e\u0301 ﬁ \ufffd x \ufffd", "🙂" * 3]
STOPS = [["\n\n"], ["o w", "lo"], ["é"], ["京", " "], ["zzz", "🙂🙂"], ["d", "ld"], ["\ufffd"], ["ab", "b", "abc"]]


def detokenizer(tokenizer, prompt, **params):
    request = SimpleNamespace(request_id="r", prompt_token_ids=prompt, prompt_embeds=None,
                              sampling_params=SamplingParams(**params))
    return FastIncrementalDetokenizer(tokenizer, request)


def deltas(tokenizer, prompt, tokens, skip_special):
    detok = detokenizer(tokenizer, prompt, skip_special_tokens=skip_special)
    return [detok.decode_next(token) for token in tokens]


def stopped(tokenizer, prompt, tokens, stop, include, min_tokens):
    detok = detokenizer(tokenizer, prompt, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    for token in tokens:
        found = detok.update([token], False)
        if found is not None:
            return found, detok.get_next_output_text(True, False)
    return None, detok.get_next_output_text(True, False)


def cases(tokenizer, seed):
    rng = random.Random(seed)
    vocabulary = sorted(tokenizer.get_vocab().values())
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    answers = [encode(text) for text in TEXTS]
    answers += [[rng.choice(vocabulary) for _ in range(rng.randint(1, 24))] for _ in range(24)]
    # Bytes, so that characters are cut and broken.
    answers += [[token for byte in rng.randbytes(12) for token in encode(bytes([byte]).decode("latin-1"))] for _ in range(4)]
    answers += [encode("🙂")[: -1], encode("🙂")[:-1] + encode("x"), encode("🙂")[1:], encode("é")[:-1] * 3]
    prompts = [encode("the"), encode("What? 👩‍👩‍👧\n") * 20]
    out = []
    for answer in answers:
        prompt, skip = rng.choice(prompts), rng.random() < 0.7
        out.append(dict(prompt=prompt, tokens=answer, skip_special=skip, deltas=deltas(tokenizer, prompt, answer, skip)))
    for text in TEXTS + ["abcab", "ab lo w zzz"]:
        for stop in STOPS:
            prompt, answer = prompts[0], encode(text)
            include, min_tokens = rng.random() < 0.5, rng.choice([0, 0, 2, 5])
            found, result = stopped(tokenizer, prompt, answer, stop, include, min_tokens)
            out.append(dict(prompt=prompt, tokens=answer, stop=stop, include=include, min_tokens=min_tokens, found=found,
                            text=result))
    return out
