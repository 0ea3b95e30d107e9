"""Fixtures in formats that Chiasm does not read (vLLM may), and files that are no images."""

from cases import add
from pictures import picture, save


def add_all():
    """Adds all fixtures in unsupported formats."""
    image = picture(13, 7)
    for form, extension in (
        ("TIFF", "tiff"),
        ("AVIF", "avif"),
        ("ICO", "ico"),
        ("JPEG2000", "jp2"),
    ):
        add(
            f"other.{extension}",
            save(image, form),
            "vLLM reads this format, Chiasm does not",
            refused=True,
        )
    add("other.html", b"<!doctype html><title>404</title>")
    add("other-empty", b"")
    add("other-one-byte", b"\x89")
