"""WebP fixtures: lossy and lossless at many settings, alpha, animations, and broken containers."""

import struct

import numpy as np

from cases import add
from libwebp import encode_webp
from pictures import SIZES, picture, save, with_alpha
from writers import anmf, riff_chunks, vp8x, webp


def add_all():
    """Adds all WebP fixtures."""
    for width, height in SIZES:
        image = picture(width, height)
        add(f"webp-lossy-{width}x{height}.webp", save(image, "WEBP", quality=70))
        add(
            f"webp-lossy-alpha-{width}x{height}.webp",
            save(with_alpha(image), "WEBP", quality=70, alpha_quality=60),
        )
        add(f"webp-lossless-{width}x{height}.webp", save(image, "WEBP", lossless=True))
        add(
            f"webp-lossless-alpha-{width}x{height}.webp",
            save(with_alpha(image), "WEBP", lossless=True, exact=True),
        )
    image = picture(77, 51)
    for quality in (0, 30, 100):
        for method in (0, 6):
            add(
                f"webp-quality{quality}-method{method}.webp",
                save(image, "WEBP", quality=quality, method=method),
            )
    array = np.asarray(image)
    for options in (
        {"filter_type": 0, "filter_strength": 60},
        {"filter_type": 1, "filter_strength": 100, "filter_sharpness": 7},
        {"filter_strength": 0},
        {"partitions": 3},
        {"segments": 1},
        {"segments": 4, "sns_strength": 100, "quality": 20.0},
        {"preprocessing": 4, "use_sharp_yuv": 1},
        {"lossless": 1, "near_lossless": 40},
    ):
        name = "-".join(f"{key.replace('_', '')}{value:g}" for key, value in options.items())
        add(f"webp-{name}.webp", encode_webp(array, **options))
    rgba = np.asarray(with_alpha(image))
    for filtering in (0, 1, 2):
        for compression in (0, 1):
            options = {"alpha_filtering": filtering, "alpha_compression": compression}
            add(
                f"webp-alpha-filtering{filtering}-compression{compression}.webp",
                encode_webp(rgba, **options),
            )
    for colours in (2, 3, 10, 200):
        add(
            f"webp-lossless-{colours}-colours.webp",
            save(image.quantize(colours).convert("RGB"), "WEBP", lossless=True),
        )
    still = picture(20, 14)
    clear = with_alpha(picture(20, 14))
    frames = [still, picture(20, 14, 1), picture(20, 14, 2)]
    add(
        "webp-animation.webp",
        save(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=50),
    )
    more = [with_alpha(frame) for frame in frames[1:]]
    add(
        "webp-animation-alpha.webp",
        save(clear, "WEBP", save_all=True, append_images=more, duration=50, lossless=True),
    )
    lossy = riff_chunks(save(still, "WEBP"))
    lossless = riff_chunks(save(clear, "WEBP", lossless=True))
    with_alph = [c for c in riff_chunks(save(clear, "WEBP")) if c[0] != b"VP8X"]
    anim = (b"ANIM", b"\xff\xff\xff\xff\0\0")
    for flags, what in ((0x02, "no-alpha"), (0x12, "alpha")):
        for chunks, kind in ((lossy, "lossy"), (lossless, "lossless"), (with_alph, "lossy-alpha")):
            frame = (b"ANMF", anmf(6, 4, 20, 14, chunks))
            add(
                f"webp-offset-frame-{kind}-{what}.webp",
                webp([(b"VP8X", vp8x(flags, 31, 22)), anim, frame]),
            )
    add(
        "webp-frame-outside.webp",
        webp([(b"VP8X", vp8x(2, 25, 22)), anim, (b"ANMF", anmf(6, 4, 20, 14, lossy))]),
    )
    add(
        "webp-frame-size-differs.webp",
        webp([(b"VP8X", vp8x(2, 31, 22)), anim, (b"ANMF", anmf(0, 0, 19, 14, lossy))]),
    )
    add(
        "webp-frame-before-anim.webp",
        webp([(b"VP8X", vp8x(2, 31, 22)), (b"ANMF", anmf(0, 0, 20, 14, lossy)), anim]),
    )
    add("webp-alpha-without-flag.webp", webp([(b"VP8X", vp8x(0, 20, 14)), *with_alph]))
    add("webp-lossless-alpha-without-flag.webp", webp([(b"VP8X", vp8x(0, 20, 14)), *lossless]))
    add("webp-flag-without-alpha.webp", webp([(b"VP8X", vp8x(0x10, 20, 14)), *lossy]))
    add("webp-canvas-differs.webp", webp([(b"VP8X", vp8x(0, 21, 14)), *lossy]))
    add(
        "webp-unknown-chunk.webp",
        webp([(b"VP8X", vp8x(0, 20, 14)), (b"abcd", b"xyz"), *lossy, (b"efgh", b"")]),
    )
    add("webp-no-image.webp", webp([(b"VP8X", vp8x(0, 20, 14)), (b"abcd", b"xyz")]))
    add("webp-two-images.webp", webp([(b"VP8X", vp8x(0, 20, 14)), *lossy, *lossy]))
    add("webp-unknown-flag.webp", webp([(b"VP8X", vp8x(0x40, 20, 14)), *lossy]))
    whole = save(image, "WEBP", quality=80)
    for cut in (12, 20, 30, len(whole) // 2, len(whole) - 1):
        add(f"webp-cut-at-{cut}.webp", whole[:cut])
    payload = riff_chunks(whole)[0][1]
    for share in (10, 50, 90, 99):
        add(
            f"webp-lossy-data-cut-at-{share}.webp",
            webp([(b"VP8 ", payload[: len(payload) * share // 100])]),
        )
    payload = riff_chunks(save(image, "WEBP", lossless=True))[0][1]
    for share in (10, 50, 90, 99):
        add(
            f"webp-lossless-data-cut-at-{share}.webp",
            webp([(b"VP8L", payload[: len(payload) * share // 100])]),
        )
    add("webp-trailing-bytes.webp", whole + b"trailing")
    for rest in (b"abc", b"abcdef", b"abcd\xff\0\0\0", b"abcd\1\0\0\0x\0", b"abcd\1\0\0\0x\0abc"):
        name = f"webp-simple-then-{len(rest)}-bytes.webp"
        add(name, b"RIFF" + struct.pack("<I", len(whole) - 8 + len(rest)) + whole[8:] + rest)
    add("webp-riff-too-long.webp", webp(riff_chunks(whole), size=len(whole) + 100))
    add_odd_chunks(still, clear)
    add("webp-bomb.webp", webp([(b"VP8X", vp8x(0, 16000, 16000)), *lossy]))


def add_odd_chunks(still, clear):
    """Adds files that exercise the special rules of libwebp's demuxer.

    These concern padding, chunks after an image, and frames after the first.
    """
    lossy, lossless = (
        riff_chunks(save(still, "WEBP"))[0],
        riff_chunks(save(clear, "WEBP", lossless=True))[-1],
    )
    alph = next(chunk for chunk in riff_chunks(save(clear, "WEBP")) if chunk[0] == b"ALPH")
    anim = (b"ANIM", b"\xff\xff\xff\xff\0\0")
    # The last byte of an image of even length lies where its chunk's padding is.
    images = (
        riff_chunks(save(picture(20, 14, seed), "WEBP", lossless=True))[0] for seed in range(99)
    )
    kind, payload = next(image for image in images if len(image[1]) % 2 == 0 and image[1][-1] > 15)
    add("webp-ends-in-padding.webp", webp([(kind, payload[:-1])])[:-1] + payload[-1:])
    flagless = bytearray(lossless[1])
    flagless[4] &= ~0x10
    canvas = (b"VP8X", vp8x(0x12, 31, 22))
    first = (b"ANMF", anmf(6, 4, 20, 14, [lossy]))
    for name, chunk in (
        (
            "lossless-without-its-alpha-flag",
            (b"ANMF", anmf(6, 4, 20, 14, [(b"VP8L", bytes(flagless))])),
        ),
        ("unknown-chunk-in-frame", (b"ANMF", anmf(6, 4, 20, 14, [lossy, (b"abcd", b"xyz")]))),
        ("image-behind-image-in-frame", (b"ANMF", anmf(6, 4, 20, 14, [lossy, lossy]))),
    ):
        add(f"webp-{name}.webp", webp([canvas, anim, chunk]))
    for name, chunk in (
        ("second-frame-outside", (b"ANMF", anmf(14, 4, 20, 14, [lossy]))),
        ("second-frame-without-image", (b"ANMF", anmf(6, 4, 20, 14, [alph]))),
        ("second-frame-empty", (b"ANMF", anmf(6, 4, 20, 14, []))),
        ("second-frame-of-unknown-chunk", (b"ANMF", anmf(6, 4, 20, 14, [(b"abcd", b"")]))),
        ("second-frame-alpha-behind-image", (b"ANMF", anmf(6, 4, 20, 14, [lossy, alph]))),
        ("second-frame-with-bad-alpha", (b"ANMF", anmf(6, 4, 20, 14, [(b"ALPH", b"\xff"), lossy]))),
    ):
        add(f"webp-{name}.webp", webp([canvas, anim, first, chunk]))
    # A chunk in a frame that extends past the frame to the end of the file: libwebp reads it.
    frame = anmf(6, 4, 20, 14, [lossy]) + b"abcd" + struct.pack("<I", 6)
    file = webp([canvas, anim, (b"ANMF", frame)]) + b"uvwxyz"
    add(
        "webp-chunk-across-the-end-of-its-frame.webp",
        file[:4] + struct.pack("<I", len(file) - 8) + file[8:],
    )
    add("webp-short-anim.webp", webp([canvas, (b"ANIM", b"\xff\xff\xff\xff"), first]))
    add("webp-long-header.webp", webp([(b"VP8X", vp8x(0, 20, 14) + b"\0\0"), lossy]))
    add("webp-simple-then-alpha.webp", webp([lossy, alph]))
    add("webp-simple-then-alpha-then-lossless.webp", webp([lossy, alph, lossless]))
    add("webp-alpha-behind-image.webp", webp([(b"VP8X", vp8x(0x10, 20, 14)), lossy, alph]))
    add(
        "webp-chunk-between-alpha-and-image.webp",
        webp([(b"VP8X", vp8x(0x10, 20, 14)), alph, (b"abcd", b""), lossy]),
    )
