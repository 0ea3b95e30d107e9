"""Fixtures in none of Chiasm's formats: what vLLM reads and Chiasm does not, and what is no image at all."""

from cases import add
from pictures import picture, save


def add_all():
    image = picture(13, 7)
    for form, extension in (("TIFF", "tiff"), ("AVIF", "avif"), ("ICO", "ico"), ("JPEG2000", "jp2")):
        add(f"other.{extension}", save(image, form), "vLLM reads this format, Chiasm does not", refused=True)
    add("other.html", b"<!doctype html><title>404</title>")
    add("other-empty", b"")
    add("other-one-byte", b"\x89")
