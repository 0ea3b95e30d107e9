"""The list of fixtures, which the *_cases modules fill and make_media_goldens.py writes, and a note that many share."""

PARTIAL = "Pillow raises; vLLM ignores that while it looks for the orientation and goes on with the part that was decoded"

cases = {}


def add(name, data, note=None, refused=False, same_as=None):
    """`refused`: Chiasm refuses what vLLM takes. `same_as`: Chiasm takes what vLLM refuses, for these other bytes."""
    assert name not in cases, name
    cases[name] = (data, note, refused, same_as)
