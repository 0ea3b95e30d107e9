"""A check that greedy answers depend on the prompt's text and media, as the tests assume.

Models with plain random initialization fail it: they repeat one token for every prompt.
"""

import sys

import numpy as np
import torch

NEW_TOKENS = 12
# The side of a coloured field: large enough to stay visible after a model has shrunk the picture.
FIELD_PIXELS = 28
FRAME_COUNT = 4
SAMPLE_RATE_HZ = 16000


def pictures():
    """Returns two pictures of coloured fields and a grey one, 224 pixels high and 280 wide."""
    fields = np.random.Generator(np.random.PCG64(7)).integers(
        0, 256, size=(2, 8, 10, 3), dtype=np.uint8
    )
    first, second = fields.repeat(FIELD_PIXELS, axis=1).repeat(FIELD_PIXELS, axis=2)
    return first, second, np.full_like(first, 128)


def videos():
    """Returns videos of the pictures, which move to the right by a field per frame."""
    return [
        np.stack([np.roll(picture, frame * FIELD_PIXELS, axis=1) for frame in range(FRAME_COUNT)])
        for picture in pictures()
    ]


def sounds():
    """Returns a low tone, a high tone and silence of one second each."""
    seconds = np.arange(SAMPLE_RATE_HZ) / SAMPLE_RATE_HZ
    low, high = (np.sin(2 * np.pi * hertz * seconds).astype(np.float32) for hertz in (220, 1760))
    return low, high, np.zeros_like(low)


# By medium: the processor's argument, the names of the items, and the function that makes them.
MEDIA = {
    "image": ("images", ("an image", "another image", "a grey image"), pictures),
    "video": ("videos", ("a video", "another video", "a grey video"), videos),
    "audio": ("audio", ("a sound", "another sound", "silence"), sounds),
}


def check_answers(family, model, processor, media):
    """Exits if two different prompts get the same answer, or an answer repeats itself."""

    def prompt(text, *parts):
        content = [*({"type": part} for part in parts), {"type": "text", "text": text}]
        return processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )

    def answer(inputs):
        with torch.no_grad():
            output = model.generate(
                **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
            )
        return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())

    def answer_text(text):
        # Uses the tokenizer alone, because PaliGemma's processor requires an image.
        return answer(processor.tokenizer([prompt(text)], return_tensors="pt"))

    def answer_item(medium, argument, item):
        inputs = processor(
            text=[prompt("what is this?", medium)], **{argument: [item]}, return_tensors="pt"
        )
        # Some processors normalize in bfloat16.
        return answer(inputs.to(model.dtype))

    answers = {
        "a text": answer_text("what is this?"),
        "another text": answer_text("compare the images"),
    }
    for medium in media:
        argument, names, make = MEDIA[medium]
        for name, item in zip(names, make(), strict=True):
            answers[name] = answer_item(medium, argument, item)
    for name, tokens in answers.items():
        print(f"  {family}: {name}: {' '.join(map(str, tokens))}")
    if len(set(answers.values())) < len(answers):
        sys.exit(f"{family}: two different prompts get the same answer")
    if any(len(set(tokens)) < 3 for tokens in answers.values()):
        sys.exit(f"{family}: an answer repeats itself")
