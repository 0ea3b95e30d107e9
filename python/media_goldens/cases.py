"""The fixtures: the *_cases modules fill this list, and make_media_goldens.py writes them."""

# The note of images that vLLM decodes in part.
PARTIALLY_DECODED = (
    "Pillow raises; vLLM ignores that while it looks for the orientation "
    "and goes on with the part that was decoded"
)

cases = {}


def add(name, data, note=None, refused=False, same_as=None):
    """Adds a fixture.

    `refused` marks a file that vLLM accepts and Chiasm refuses. `same_as` marks a file that vLLM
    refuses and Chiasm accepts: the bytes of a file with the pixels that Chiasm returns.
    """
    assert name not in cases, name
    cases[name] = (data, note, refused, same_as)
