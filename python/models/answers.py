"""The check on what the tests rest on: greedy answers depend on the text and on the pixels.

Plain random initialisation fails it: such a model repeats one token whatever it is asked.
"""

import sys

import numpy as np
import torch

NEW_TOKENS = 12
# Fields of this many pixels stay visible in a picture that a model shrinks.
FIELD = 28


def pictures():
    """Two pictures of coloured fields and a grey one, 224 high and 280 wide."""
    fields = np.random.Generator(np.random.PCG64(7)).integers(0, 256, size=(2, 8, 10, 3), dtype=np.uint8)
    first, second = fields.repeat(FIELD, axis=1).repeat(FIELD, axis=2)
    return first, second, np.full_like(first, 128)


def check_answers(family, model, processor):
    """Ends the program if two different prompts get the same answer."""

    def answer(text, image=None):
        content = [{"type": "text", "text": text}]
        if image is not None:
            content.insert(0, {"type": "image"})
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=[prompt], images=None if image is None else [image], return_tensors="pt")
        # Some processors normalise in bfloat16.
        inputs = inputs.to(model.dtype)
        with torch.no_grad():
            output = model.generate(
                **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
            )
        return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())

    first, second, grey = pictures()
    answers = {
        "a text": answer("what is this?"),
        "another text": answer("compare the images"),
        "an image": answer("what is this?", first),
        "another image": answer("what is this?", second),
        "a grey image": answer("what is this?", grey),
    }
    for name, tokens in answers.items():
        print(f"  {family}: {name}: {' '.join(map(str, tokens))}")
    if len(set(answers.values())) < len(answers):
        sys.exit(f"{family}: two different prompts get the same answer")
    if any(len(set(tokens)) < 3 for tokens in answers.values()):
        sys.exit(f"{family}: an answer repeats itself")
