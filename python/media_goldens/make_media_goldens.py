#!/usr/bin/env python3
"""Makes the fixtures of chiasm-media: small image files, and what vLLM's own loader makes of them.

    VLLM_TARGET_DEVICE=cpu python make_media_goldens.py

needs vLLM 0.32 and Pillow 13 (and OpenCV, for the JPEG samplings that Pillow does not write). It writes the files and an
`index.json` to crates/chiasm-media/tests/goldens. An entry is either `pixels` (size and blake3 of the RGB bytes) or
`error`. Where Chiasm differs from vLLM on purpose, the entry is what Chiasm does and the note says why.
"""

import io
import json
import os
import shutil
import struct
import warnings
import zlib
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
warnings.simplefilter("ignore")

import blake3
import cv2
import numpy as np
import PIL
import vllm
from PIL import Image, features
from vllm.multimodal.media import ImageMediaIO

from libwebp import encode_webp
from writers import *

OUT = Path(__file__).resolve().parents[2] / "crates/chiasm-media/tests/goldens"
SIZES = [(1, 1), (1, 23), (23, 1), (2, 3), (7, 5), (16, 16), (37, 23)]
FILLED = "libjpeg fills up what is missing; Chiasm only does so for a single scan without restart markers"
PARTIAL = "Pillow raises; vLLM ignores that while it looks for the orientation and goes on with the part that was decoded"

cases = {}


def add(name, data, note=None, refused=False, same_as=None):
    """`refused`: Chiasm refuses what vLLM takes. `same_as`: Chiasm takes what vLLM refuses, for these other bytes."""
    assert name not in cases, name
    cases[name] = (data, note, refused, same_as)


def picture(width, height, seed=0):
    """A gradient with noise and some hard edges."""
    rng = np.random.default_rng(1000 * width + height + seed)
    y, x = np.mgrid[0:height, 0:width]
    base = np.stack([x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), (x * 7 + y * 13) % 256], -1)
    noisy = base + rng.integers(-25, 26, base.shape)
    noisy[(x // 5 + y // 4) % 7 == 0] = [250, 20, 60]
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def alpha_of(width, height):
    """Every alpha from 0 to 255 where there is room."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(((x * 11 + y * 29) % 256).astype(np.uint8))


def with_alpha(image):
    image = image.copy()
    image.putalpha(alpha_of(*image.size))
    return image


def save(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def samples(seed, most):
    """Some function of a place to a sample; deterministic, not smooth."""
    return lambda x, y, c=0: (x * 37 + y * 101 + c * 59 + seed * 17 + (x * y) % 23) * 2654435761 % 4294967296 * (most + 1) >> 32


# --- PNG -------------------------------------------------------------------------------------------------------------

PNG_LAYOUTS = [(d, c) for c, ds in {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}.items() for d in ds]
COLOURS = {0: "grey", 2: "rgb", 3: "palette", 4: "grey-alpha", 6: "rgba"}


def palette_bytes(entries):
    return bytes((i * 73 + c * 91 + 5) % 256 for i in range(entries) for c in range(3))


def png_pixel(depth, colour):
    value = samples(depth + colour, (1 << depth) - 1)
    return lambda x, y: [value(x, y, c) for c in range(CHANNELS[colour])]


def png_cases():
    for depth, colour in PNG_LAYOUTS:
        plte = [chunk(b"PLTE", palette_bytes(1 << depth))] if colour == 3 else []
        for width, height in SIZES:
            for interlaced in (False, True):
                name = f"png-{COLOURS[colour]}{depth}-{width}x{height}{'-adam7' if interlaced else ''}.png"
                add(name, png(width, height, depth, colour, png_pixel(depth, colour), plte, interlaced=interlaced))
    # 16-bit grey around the value where Pillow clips, and with a transparent grey whose high byte Pillow forgets.
    ramp = lambda x, y: [x * 3 + y * 97]
    add("png-grey16-clip.png", png(100, 6, 16, 0, ramp))
    for grey in (40, 255, 0x0128):
        add(f"png-grey16-trns{grey}.png", png(100, 6, 16, 0, ramp, [chunk(b"tRNS", struct.pack(">H", grey))]))
    for depth in (1, 2, 4, 8):
        for grey in sorted({0, 1, (1 << depth) - 1, 0x155, 0xAA}):
            trns = [chunk(b"tRNS", struct.pack(">H", grey))]
            add(f"png-grey{depth}-trns{grey}.png", png(37, 9, depth, 0, png_pixel(depth, 0), trns))
    add("png-rgb8-trns-is-kept.png", png(16, 16, 8, 2, lambda x, y: [255, x, y], [chunk(b"tRNS", struct.pack(">HHH", 255, 3, 4))]))
    add("png-rgb16-trns.png", png(16, 16, 16, 2, png_pixel(16, 2), [chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3))]))
    for depth in (1, 2, 4, 8):
        entries = 1 << depth
        table = chunk(b"PLTE", palette_bytes(entries))
        for what, trns in {
            "one": b"\xff\0",
            "one-newline": b"\0\n",
            "some": bytes((i * 67) % 256 for i in range(entries)),
            "all-opaque": b"\xff" * entries,
            "empty": b"",
            "short": b"\x80",
        }.items():
            add(f"png-palette{depth}-trns-{what}.png", png(37, 9, depth, 3, png_pixel(depth, 3), [table, chunk(b"tRNS", trns)]))
    pixel = png_pixel(8, 3)
    add("png-palette8-short.png", png(37, 9, 8, 3, pixel, [chunk(b"PLTE", palette_bytes(20))]))
    add("png-palette8-no-plte.png", png(37, 9, 8, 3, pixel))
    add("png-palette8-odd-plte.png", png(37, 9, 8, 3, pixel, [chunk(b"PLTE", palette_bytes(20)[:-1])]))
    add("png-palette8-long-plte.png", png(37, 9, 8, 3, pixel, [chunk(b"PLTE", palette_bytes(257))]))
    add("png-palette8-long-trns.png", png(37, 9, 8, 3, pixel, [chunk(b"PLTE", palette_bytes(256)), chunk(b"tRNS", bytes(range(256)) + b"\1")]))
    add("png-palette8-trns-before-plte.png", png(37, 9, 8, 3, pixel, [chunk(b"tRNS", b"\x80\x10"), chunk(b"PLTE", palette_bytes(256))]))
    add("png-palette8-trns-behind-data.png", png(37, 9, 8, 3, pixel, [chunk(b"PLTE", palette_bytes(256))], [chunk(b"tRNS", b"\x80\x10")]))
    add("png-grey8-trns-truncated.png", png(7, 5, 8, 0, png_pixel(8, 0), [chunk(b"tRNS", b"\0")]))
    for kind in range(5):
        add(f"png-filter{kind}.png", png(37, 9, 8, 6, png_pixel(8, 6), filters=[kind]))
        add(f"png-filter{kind}-bits.png", png(37, 9, 2, 0, png_pixel(2, 0), filters=[kind]))
        add(f"png-filter{kind}-grey16.png", png(37, 9, 16, 0, png_pixel(16, 0), filters=[kind]))
    pixel = png_pixel(8, 2)
    add("png-many-idat.png", png(37, 23, 8, 2, pixel, idat=7))
    add("png-empty-idat.png", png(37, 23, 8, 2, pixel, [chunk(b"IDAT", b"")], idat=100))
    raw = png_rows(pixel, 37, 23, 8, 2)
    for level in (0, 1, 6):
        add(f"png-level{level}.png", png(37, 23, 8, 2, None, data=zlib.compress(raw, level)))
    add("png-no-iend.png", png(37, 23, 8, 2, pixel, end=False))
    add("png-trailing-bytes.png", png(37, 23, 8, 2, pixel) + b"trailing")
    add("png-unknown-chunks.png", png(37, 23, 8, 2, pixel, [chunk(b"prVt", b"x"), chunk(b"ABCD", b"y")], [chunk(b"wxYz", b"z")]))
    add("png-ancillary.png", png(7, 5, 8, 2, png_pixel(8, 2), [chunk(b"gAMA", struct.pack(">I", 45455)), chunk(b"sRGB", b"\0"), chunk(b"pHYs", struct.pack(">IIB", 1, 1, 1)), chunk(b"iCCP", b"x\0\0" + zlib.compress(b"profile")), chunk(b"bKGD", bytes(6))]))
    compressed = zlib.compress(raw)
    add("png-wrong-adler.png", png(37, 23, 8, 2, None, data=compressed[:-4] + b"\0\0\0\0"), PARTIAL, refused=True)
    add("png-data-too-long.png", png(37, 23, 8, 2, None, data=zlib.compress(raw + bytes(1000))))
    add("png-data-too-short.png", png(37, 23, 8, 2, None, data=zlib.compress(raw[: 10 * 112])))
    add("png-data-too-short-by-a-byte.png", png(37, 23, 8, 2, None, data=zlib.compress(raw[: 10 * 112 - 1])))
    for colour in (0, 3, 4, 6):
        before = [chunk(b"PLTE", palette_bytes(256))] if colour == 3 else []
        short = zlib.compress(png_rows(png_pixel(8, colour), 37, 9, 8, colour))
        add(f"png-data-too-short-{COLOURS[colour]}.png", png(37, 23, 8, colour, None, before, data=short))
        short = zlib.compress(png_rows(png_pixel(8, colour), 8, 8, 8, colour, True)[: 2 * (1 + CHANNELS[colour])])
        add(f"png-data-too-short-{COLOURS[colour]}-adam7.png", png(8, 8, 8, colour, None, before, interlaced=True, data=short))
    add("png-data-cut-off.png", png(37, 23, 8, 2, None, data=compressed[: len(compressed) // 2]))
    broken = bytearray(compressed)
    broken[len(broken) // 2] ^= 0x55
    broken[len(broken) // 2 + 1] ^= 0xAA
    add("png-data-broken.png", png(37, 23, 8, 2, None, data=bytes(broken)), PARTIAL, refused=True)
    # A deflate block of type 3 does not exist.
    add("png-data-bad-block.png", png(37, 23, 8, 2, None, data=b"\x78\x9c\x07" + bytes(9)), PARTIAL, refused=True)
    add("png-data-no-zlib.png", png(37, 23, 8, 2, None, data=b"no zlib data here"), PARTIAL, refused=True)
    add("png-data-bad-filter.png", png(37, 23, 8, 2, None, data=zlib.compress(raw[:1120] + b"\5" + raw[1121:])), PARTIAL, refused=True)
    whole = png(37, 23, 8, 2, pixel)
    add("png-idat-wrong-crc.png", whole[:-16] + b"\0\0\0\0" + whole[-12:])
    for cut in (4, 8, 16, 33, 40, 60, len(whole) // 2, len(whole) - 17, len(whole) - 12, len(whole) - 4):
        add(f"png-cut-at-{cut}.png", whole[:cut])
    add("png-wrong-ihdr-crc.png", whole[:29] + b"\0\0\0\0" + whole[33:])
    add("png-wrong-text-crc.png", png(7, 5, 8, 2, png_pixel(8, 2), [chunk(b"tEXt", b"a\0b", crc=1)]))
    add("png-wrong-text-crc-behind-data.png", png(7, 5, 8, 2, png_pixel(8, 2), after=[chunk(b"tEXt", b"a\0b", crc=1)]))
    add("png-zero-width.png", png(0, 5, 8, 2, None, data=b""))
    add("png-zero-height.png", png(5, 0, 8, 2, None, data=b""))
    add("png-bad-depth.png", png(7, 5, 3, 2, None, data=compressed))
    add("png-bad-filter-method.png", whole[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", 37, 23, 8, 2, 0, 1, 0)) + whole[33:])
    add("png-no-idat.png", png(7, 5, 8, 2, None, data=b"", idat=1))
    add("png-bomb.png", png(60000, 60000, 8, 0, None, data=zlib.compress(bytes(100))))
    add("png-bomb-text.png", png(7, 5, 8, 2, png_pixel(8, 2), [chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2 << 20), 9))]))
    add("png-bomb-icc.png", png(7, 5, 8, 2, png_pixel(8, 2), [chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(2 << 20), 9))]))
    # Animations: the default image counts.
    actl = lambda frames: chunk(b"acTL", struct.pack(">II", frames, 0))
    fctl = lambda seq, w=37, h=23, x=0, y=0: chunk(b"fcTL", struct.pack(">IIIIIHHBB", seq, w, h, x, y, 1, 10, 0, 0))
    fdat = lambda seq: chunk(b"fdAT", struct.pack(">I", seq) + zlib.compress(png_rows(png_pixel(8, 2), 37, 23, 8, 2)))
    orient6 = chunk(b"eXIf", exif(6))
    add("apng-first-frame-is-default.png", png(37, 23, 8, 2, pixel, [actl(2), fctl(0)], [fctl(1), fdat(2)]))
    add("apng-default-image.png", png(37, 23, 8, 2, pixel, [actl(1)], [fctl(0), fdat(1)]))
    add("apng-exif-behind-frames.png", png(37, 23, 8, 2, pixel, [actl(2), fctl(0)], [fctl(1), fdat(2), orient6]))
    add("apng-one-frame-exif-behind.png", png(37, 23, 8, 2, pixel, [actl(1), fctl(0)], [orient6]))
    add("apng-bad-sequence.png", png(37, 23, 8, 2, pixel, [actl(2), fctl(1)]))
    add("apng-bad-sequence-behind.png", png(37, 23, 8, 2, pixel, [fctl(0)], [orient6, fctl(5)]))
    add("apng-frame-too-large.png", png(37, 23, 8, 2, pixel, [actl(2), fctl(0, 38, 23)]))
    add("apng-first-frame-is-small.png", png(37, 23, 8, 2, pixel, [actl(2), fctl(0, 30, 20)]), "an animation whose first frame does not fill the image breaks the format's rules", refused=True)


# --- JPEG ------------------------------------------------------------------------------------------------------------


def jpeg_cases():
    for width, height in SIZES:
        image = picture(width, height)
        for sampling in ("4:4:4", "4:2:2", "4:2:0"):
            for progressive in (False, True):
                name = f"jpeg-{sampling.replace(':', '')}-{width}x{height}{'-progressive' if progressive else ''}.jpg"
                add(name, save(image, "JPEG", quality=75, subsampling=sampling, progressive=progressive))
        add(f"jpeg-grey-{width}x{height}.jpg", save(image.convert("L"), "JPEG", quality=80))
        add(f"jpeg-cmyk-{width}x{height}.jpg", save(image.convert("CMYK"), "JPEG", quality=80))
    image = picture(61, 45)
    array = np.asarray(image)[..., ::-1]
    for sampling in (0x411111, 0x221111, 0x211111, 0x121111, 0x111111):
        for progressive in (0, 1):
            options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling, cv2.IMWRITE_JPEG_PROGRESSIVE, progressive]
            add(f"jpeg-sampling{sampling:x}{'-progressive' if progressive else ''}.jpg", cv2.imencode(".jpg", array, options)[1].tobytes())
    for quality in (1, 30, 95, 100):
        add(f"jpeg-quality{quality}.jpg", save(image, "JPEG", quality=quality))
    add("jpeg-restarts.jpg", save(image, "JPEG", restart_marker_blocks=2))
    add("jpeg-optimised.jpg", save(image, "JPEG", optimize=True))
    add("jpeg-grey-progressive.jpg", save(image.convert("L"), "JPEG", progressive=True))
    add("jpeg-cmyk-progressive.jpg", save(image.convert("CMYK"), "JPEG", progressive=True))
    add("jpeg-keep-rgb.jpg", save(image, "JPEG", keep_rgb=True))
    add("jpeg-comment-icc.jpg", save(image, "JPEG", comment=b"a comment", icc_profile=b"no profile", dpi=(300, 300)))
    plain = save(image, "JPEG")
    # What the Adobe segment says of three and four components.
    adobe = lambda transform: jpeg_segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))
    cmyk = save(image.convert("CMYK"), "JPEG")
    at = cmyk.index(b"\xff\xee")
    without_adobe = cmyk[:at] + cmyk[at + 16 :]
    no_jfif = plain[:2] + plain[plain.index(b"\xff\xdb") :]
    add("jpeg-no-jfif.jpg", no_jfif)
    for transform in (0, 1, 2):
        add(f"jpeg-adobe{transform}.jpg", with_segments(no_jfif, adobe(transform)))
        add(f"jpeg-cmyk-adobe{transform}.jpg", with_segments(without_adobe, adobe(transform)))
    add("jpeg-cmyk-no-adobe.jpg", without_adobe)
    # Errors, and what libjpeg only warns about.
    add("jpeg-no-end.jpg", plain[:-2], "Pillow misses the end marker, but the image is complete without it", same_as=plain)
    for share in (1, 5, 20, 50, 75, 90, 99):
        add(f"jpeg-cut-at-{share}.jpg", plain[: len(plain) * share // 100])
    for share in (50, 75, 95):
        add(f"jpeg-cut-at-{share}-eoi.jpg", plain[: len(plain) * share // 100] + b"\xff\xd9")
    progressive = save(image, "JPEG", progressive=True)
    for share in (20, 50, 90):
        add(f"jpeg-progressive-cut-at-{share}.jpg", progressive[: len(progressive) * share // 100])
        add(f"jpeg-progressive-cut-at-{share}-eoi.jpg", progressive[: len(progressive) * share // 100] + b"\xff\xd9", *((FILLED, True) if share > 50 else ()))
    scans = [at for at in range(len(progressive) - 1) if progressive[at : at + 2] == b"\xff\xda"]
    for number, at in list(enumerate(scans))[1:4]:
        # The tables of the next scan are in front of it.
        add(f"jpeg-progressive-cut-behind-scan-{number}.jpg", progressive[:at])
        add(f"jpeg-progressive-cut-behind-scan-{number}-eoi.jpg", progressive[:at] + b"\xff\xd9")
    thumbnail = jpeg_segment(0xE1, b"Exif\0\0" + exif(6) + save(picture(7, 5), "JPEG"))
    add("jpeg-thumbnail.jpg", with_segments(plain, thumbnail))
    add("jpeg-thumbnail-cut-off.jpg", with_segments(plain, thumbnail)[: len(thumbnail) + len(plain) // 2])
    add("jpeg-restarts-cut-off-eoi.jpg", save(image, "JPEG", restart_marker_blocks=2)[:1200] + b"\xff\xd9", FILLED, refused=True)
    add("jpeg-mpo.jpg", save(image, "MPO", save_all=True, append_images=[picture(61, 45, 1)]))
    start = plain.index(b"\xff\xda") + 14
    for seed in range(6):
        rng = np.random.default_rng(seed)
        broken = bytearray(plain)
        for _ in range(3):
            broken[int(rng.integers(start, len(plain) - 2))] = int(rng.integers(0, 255))
        add(f"jpeg-broken-{seed}.jpg", bytes(broken))
    add("jpeg-trailing-bytes.jpg", plain + b"trailing bytes")
    add("jpeg-junk-before-marker.jpg", plain[:20] + b"\0junk" + plain[20:])
    add("jpeg-zero-height.jpg", zero_height(plain))
    add("jpeg-12-bit.jpg", patched_frame(plain, 0, 12))
    add("jpeg-2-components.jpg", patched_frame(plain, 5, 2))
    add("jpeg-no-tables.jpg", plain[:2] + plain[plain.index(b"\xff\xc0") :], PARTIAL, refused=True)
    add("jpeg-bomb.jpg", with_size(plain, 65500, 65500))


def patched_frame(jpeg, offset, value):
    jpeg, at = bytearray(jpeg), jpeg.index(b"\xff\xc0") + 4
    jpeg[at + offset] = value
    return bytes(jpeg)


def zero_height(jpeg):
    return patched_frame(patched_frame(jpeg, 1, 0), 2, 0)


def with_size(jpeg, width, height):
    jpeg, at = bytearray(jpeg), jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(jpeg)


# --- orientation -----------------------------------------------------------------------------------------------------


def orientation_cases():
    image = picture(21, 13)
    jpeg = save(image, "JPEG", quality=90)
    webp_still = save(image, "WEBP", quality=80)
    webp_lossless = save(with_alpha(image), "WEBP", lossless=True)
    pixel = png_pixel(8, 2)
    app1 = lambda content: jpeg_segment(0xE1, content)
    extended = lambda source, flags, *more: webp([(b"VP8X", vp8x(flags, 21, 13)), *riff_chunks(source), *more])
    for value in range(10):
        add(f"exif-{value}.jpg", with_segments(jpeg, app1(b"Exif\0\0" + exif(value, little=value % 2 == 0))))
        add(f"exif-{value}.png", png(21, 13, 8, 2, pixel, [chunk(b"eXIf", exif(value, little=value % 2 == 1))]))
        add(f"exif-{value}.webp", extended(webp_still, 8, (b"EXIF", exif(value))))
        add(f"exif-{value}-alpha.webp", extended(webp_lossless, 0x18, (b"EXIF", b"Exif\0\0" + exif(value))))
    exif6, exif3 = exif(6), exif(3)
    app_exif = lambda tiff: app1(b"Exif\0\0" + tiff)
    app_xmp = lambda packet: app1(b"http://ns.adobe.com/xap/1.0/\0" + packet)
    # Where it is looked for, and what wins.
    add("exif-grey.jpg", with_segments(save(image.convert("L"), "JPEG"), app_exif(exif6)))
    add("exif-cmyk.jpg", with_segments(save(image.convert("CMYK"), "JPEG"), app_exif(exif(8))))
    add("exif-palette.png", png(21, 13, 4, 3, png_pixel(4, 3), [chunk(b"PLTE", palette_bytes(16)), chunk(b"tRNS", b"\0\x80"), chunk(b"eXIf", exif(5))]))
    add("exif-grey16.png", png(21, 13, 16, 0, png_pixel(16, 0), [chunk(b"eXIf", exif(7))]))
    add("exif-bit-adam7.png", png(21, 13, 1, 0, png_pixel(1, 0), [chunk(b"eXIf", exif(6))], interlaced=True))
    add("exif-twice-prefixed.jpg", with_segments(jpeg, app1(b"Exif\0\0Exif\0\0" + exif6)))
    add("exif-two-segments.jpg", with_segments(jpeg, app_exif(exif6), app_exif(exif3)))
    add("exif-split.jpg", with_segments(jpeg, app_exif(exif6[:14]), app_exif(exif6[14:])))
    add("exif-behind-frame.jpg", behind_frame(jpeg, app_exif(exif6)))
    add("exif-no-jfif.jpg", jpeg[:2] + app_exif(exif6) + jpeg[jpeg.index(b"\xff\xdb") :])
    add("exif-no-jfif-unreadable.jpg", jpeg[:2] + app_exif(b"II*\0") + app_xmp(xmp(6)) + jpeg[jpeg.index(b"\xff\xdb") :])
    add("exif-unreadable.jpg", with_segments(jpeg, app_exif(b"garbage in here"), app_xmp(xmp(6))))
    add("exif-empty.jpg", with_segments(jpeg, app_exif(b"")))
    add("exif-empty-xmp.jpg", with_segments(jpeg, app_exif(b""), app_xmp(xmp(6))))
    add("exif-long.jpg", with_segments(jpeg, app_exif(exif(6, kind=4))))
    add("exif-byte.jpg", with_segments(jpeg, app_exif(exif(6, kind=1))))
    add("exif-two-values.jpg", with_segments(jpeg, app_exif(exif(6, count=2))))
    add("exif-odd-magic.jpg", with_segments(jpeg, app_exif(b"II\0*" + exif6[4:])))
    add("exif-bigtiff.jpg", with_segments(jpeg, app_exif(b"II+\0" + exif6[4:])))
    add("exif-offset-behind-end.jpg", with_segments(jpeg, app_exif(b"II*\0\xff\0\0\0" + exif6[8:])))
    add("exif-cut-off.jpg", with_segments(jpeg, app_exif(exif6[:-8])))
    add("exif-unknown-type-before.jpg", with_segments(jpeg, app_exif(exif(6, more=[(256, 99, 1, b"\1\0\0\0")]))))
    add("exif-value-behind-end-before.jpg", with_segments(jpeg, app_exif(exif(6, more=[(256, 3, 9, b"\xf0\0\0\0")])), app_xmp(xmp(8))))
    add("exif-value-too-long-before.jpg", with_segments(jpeg, app_exif(exif(6, more=[(256, 3, 9999, b"\x08\0\0\0")]))))
    add("exif-tag-twice.jpg", with_segments(jpeg, app_exif(exif(6, more=[(274, 3, 1, b"\3\0\0\0")]))))
    for as_element in (False, True):
        packet = xmp(6, as_element)
        kind = "element" if as_element else "attribute"
        add(f"xmp-{kind}.jpg", with_segments(jpeg, app_xmp(packet)))
        add(f"xmp-{kind}.png", png(21, 13, 8, 2, pixel, [chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + packet)]))
        add(f"xmp-{kind}.webp", extended(webp_still, 4, (b"XMP ", packet)))
    add("xmp-two-packets.jpg", with_segments(jpeg, app_xmp(xmp(6)), app_xmp(xmp(3))))
    add("xmp-and-exif.jpg", with_segments(jpeg, app_xmp(xmp(6)), app_exif(exif3)))
    add("xmp-and-exif-without.jpg", with_segments(jpeg, app_xmp(xmp(6)), app_exif(b"II*\0\x08\0\0\0\0\0\0\0\0\0")))
    add("xmp-compressed.png", png(21, 13, 8, 2, pixel, [chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(6)))]))
    add("xmp-broken-compression.png", png(21, 13, 8, 2, pixel, [chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0nonsense")]))
    add("xmp-not-utf8.png", png(21, 13, 8, 2, pixel, [chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0\xff" + xmp(6))]))
    add("xmp-as-text.png", png(21, 13, 8, 2, pixel, [chunk(b"tEXt", b"XML:com.adobe.xmp\0" + xmp(6))]))
    add("xmp-as-other-text.png", png(21, 13, 8, 2, pixel, [chunk(b"tEXt", b"xmp\0" + xmp(6))]))
    add("exif-behind-data.png", png(21, 13, 8, 2, pixel, after=[chunk(b"eXIf", exif6)]))
    add("exif-behind-data-refused-text.png", png(21, 13, 8, 2, pixel, [chunk(b"eXIf", exif6)], [chunk(b"gAMA", b"x")]))
    add("exif-before-iend-missing.png", png(21, 13, 8, 2, pixel, after=[chunk(b"eXIf", exif6)], end=False))
    add("exif-twice.png", png(21, 13, 8, 2, pixel, [chunk(b"eXIf", exif6)], [chunk(b"eXIf", exif3)]))
    profile = b"\nexif\n%8d\n" % len(exif6 + b"Exif\0\0") + (b"Exif\0\0" + exif6).hex().encode() + b"\n"
    add("exif-raw-profile.png", png(21, 13, 8, 2, pixel, [chunk(b"tEXt", b"Raw profile type exif\0" + profile)]))
    add("exif-raw-profile-compressed.png", png(21, 13, 8, 2, pixel, [chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile))]))
    add("exif-raw-profile-bad.png", png(21, 13, 8, 2, pixel, [chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 3\nxyz\n")]))
    add("exif-raw-profile-and-chunk.png", png(21, 13, 8, 2, pixel, [chunk(b"tEXt", b"Raw profile type exif\0" + profile), chunk(b"eXIf", exif3)]))
    add("exif-as-text.png", png(21, 13, 8, 2, pixel, [chunk(b"tEXt", b"exif\0" + exif6)]))
    add("exif-as-compressed-text.png", png(21, 13, 8, 2, pixel, [chunk(b"zTXt", b"exif\0\0" + zlib.compress(exif6))]))
    add("exif-without-flag.webp", extended(webp_still, 0, (b"EXIF", exif6)))
    add("exif-before-image.webp", webp([(b"VP8X", vp8x(8, 21, 13)), (b"EXIF", exif6), *riff_chunks(webp_still)]))
    add("exif-twice.webp", extended(webp_still, 8, (b"EXIF", exif6), (b"EXIF", exif3)))
    add("exif-odd-length.webp", extended(webp_still, 8, (b"EXIF", exif6 + b"x")))
    add("exif-in-simple-file.webp", webp([*riff_chunks(webp_still), (b"EXIF", exif6)]))


def behind_frame(jpeg, segment):
    at = jpeg.index(b"\xff\xc0")
    at += 2 + struct.unpack(">H", jpeg[at + 2 : at + 4])[0]
    return jpeg[:at] + segment + jpeg[at:]


# --- WebP ------------------------------------------------------------------------------------------------------------


def webp_cases():
    for width, height in SIZES:
        image = picture(width, height)
        add(f"webp-lossy-{width}x{height}.webp", save(image, "WEBP", quality=70))
        add(f"webp-lossy-alpha-{width}x{height}.webp", save(with_alpha(image), "WEBP", quality=70, alpha_quality=60))
        add(f"webp-lossless-{width}x{height}.webp", save(image, "WEBP", lossless=True))
        add(f"webp-lossless-alpha-{width}x{height}.webp", save(with_alpha(image), "WEBP", lossless=True, exact=True))
    image = picture(77, 51)
    for quality in (0, 30, 100):
        for method in (0, 6):
            add(f"webp-quality{quality}-method{method}.webp", save(image, "WEBP", quality=quality, method=method))
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
            add(f"webp-alpha-filtering{filtering}-compression{compression}.webp", encode_webp(rgba, **options))
    for colours in (2, 3, 10, 200):
        add(f"webp-lossless-{colours}-colours.webp", save(image.quantize(colours).convert("RGB"), "WEBP", lossless=True))
    still, clear = picture(20, 14), with_alpha(picture(20, 14))
    frames = [still, picture(20, 14, 1), picture(20, 14, 2)]
    add("webp-animation.webp", save(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=50))
    add("webp-animation-alpha.webp", save(clear, "WEBP", save_all=True, append_images=[with_alpha(f) for f in frames[1:]], duration=50, lossless=True))
    lossy, lossless = riff_chunks(save(still, "WEBP")), riff_chunks(save(clear, "WEBP", lossless=True))
    with_alph = [c for c in riff_chunks(save(clear, "WEBP")) if c[0] != b"VP8X"]
    anim = (b"ANIM", b"\xff\xff\xff\xff\0\0")
    for flags, what in ((0x02, "no-alpha"), (0x12, "alpha")):
        for chunks, kind in ((lossy, "lossy"), (lossless, "lossless"), (with_alph, "lossy-alpha")):
            frame = (b"ANMF", anmf(6, 4, 20, 14, chunks))
            add(f"webp-offset-frame-{kind}-{what}.webp", webp([(b"VP8X", vp8x(flags, 31, 22)), anim, frame]))
    add("webp-frame-outside.webp", webp([(b"VP8X", vp8x(2, 25, 22)), anim, (b"ANMF", anmf(6, 4, 20, 14, lossy))]))
    add("webp-frame-size-differs.webp", webp([(b"VP8X", vp8x(2, 31, 22)), anim, (b"ANMF", anmf(0, 0, 19, 14, lossy))]))
    add("webp-frame-before-anim.webp", webp([(b"VP8X", vp8x(2, 31, 22)), (b"ANMF", anmf(0, 0, 20, 14, lossy)), anim]))
    add("webp-alpha-without-flag.webp", webp([(b"VP8X", vp8x(0, 20, 14)), *with_alph]))
    add("webp-lossless-alpha-without-flag.webp", webp([(b"VP8X", vp8x(0, 20, 14)), *lossless]))
    add("webp-flag-without-alpha.webp", webp([(b"VP8X", vp8x(0x10, 20, 14)), *lossy]))
    add("webp-canvas-differs.webp", webp([(b"VP8X", vp8x(0, 21, 14)), *lossy]))
    add("webp-unknown-chunk.webp", webp([(b"VP8X", vp8x(0, 20, 14)), (b"abcd", b"xyz"), *lossy, (b"efgh", b"")]))
    add("webp-no-image.webp", webp([(b"VP8X", vp8x(0, 20, 14)), (b"abcd", b"xyz")]))
    add("webp-two-images.webp", webp([(b"VP8X", vp8x(0, 20, 14)), *lossy, *lossy]))
    add("webp-unknown-flag.webp", webp([(b"VP8X", vp8x(0x40, 20, 14)), *lossy]))
    whole = save(image, "WEBP", quality=80)
    for cut in (12, 20, 30, len(whole) // 2, len(whole) - 1):
        add(f"webp-cut-at-{cut}.webp", whole[:cut])
    payload = riff_chunks(whole)[0][1]
    for share in (10, 50, 90, 99):
        add(f"webp-lossy-data-cut-at-{share}.webp", webp([(b"VP8 ", payload[: len(payload) * share // 100])]))
    payload = riff_chunks(save(image, "WEBP", lossless=True))[0][1]
    for share in (10, 50, 90, 99):
        add(f"webp-lossless-data-cut-at-{share}.webp", webp([(b"VP8L", payload[: len(payload) * share // 100])]))
    add("webp-trailing-bytes.webp", whole + b"trailing")
    for rest in (b"abc", b"abcdef", b"abcd\xff\0\0\0", b"abcd\1\0\0\0x\0", b"abcd\1\0\0\0x\0abc"):
        name = f"webp-simple-then-{len(rest)}-bytes.webp"
        add(name, b"RIFF" + struct.pack("<I", len(whole) - 8 + len(rest)) + whole[8:] + rest)
    add("webp-riff-too-long.webp", webp(riff_chunks(whole), size=len(whole) + 100))
    add("webp-bomb.webp", webp([(b"VP8X", vp8x(0, 16000, 16000)), *lossy]))


# --- GIF -------------------------------------------------------------------------------------------------------------


def gif_cases():
    for width, height in SIZES:
        image = picture(width, height).quantize(64)
        add(f"gif-saved-{width}x{height}.gif", save(image, "GIF", interlace=0))
        add(f"gif-saved-{width}x{height}-interlaced.gif", save(image, "GIF", interlace=1))
    image = picture(61, 45).quantize(256)
    add("gif-256-colours.gif", save(image, "GIF"))
    add("gif-transparent.gif", save(image, "GIF", transparency=7))
    add("gif-grey.gif", save(picture(37, 23).convert("L"), "GIF"))
    frames = [picture(30, 20, seed).quantize(32) for seed in range(3)]
    add("gif-animation.gif", save(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50, disposal=2))
    table = palette_bytes
    for bits in range(1, 9):
        index = samples(bits, (1 << bits) - 1)
        rows = [[index(x, y) for x in range(13)] for y in range(11)]
        code = max(2, bits)
        add(f"gif-{bits}-bits.gif", gif((13, 11), (0, 0, 13, 11), rows, code, table(1 << bits)))
        add(f"gif-{bits}-bits-local.gif", gif((13, 11), (0, 0, 13, 11), rows, code, None, table(1 << bits), transparent=1))
    index = samples(3, 15)
    rows = [[index(x, y) for x in range(13)] for y in range(11)]
    full = (0, 0, 13, 11)
    grey = bytes(value for i in range(16) for value in (i, i, i))
    add("gif-offset.gif", gif((20, 18), (4, 3, 13, 11), rows, 4, table(16)))
    add("gif-offset-transparent.gif", gif((20, 18), (4, 3, 13, 11), rows, 4, table(16), transparent=5))
    add("gif-offset-interlaced.gif", gif((20, 18), (4, 3, 13, 11), rows, 4, table(16), interlaced=True))
    add("gif-beyond-screen.gif", gif((10, 5), (4, 3, 13, 11), rows, 4, table(16)))
    add("gif-empty-screen.gif", gif((0, 0), full, rows, 4, table(16)))
    add("gif-local-and-global.gif", gif((13, 11), full, rows, 4, table(16)[::-1], table(16)))
    add("gif-grey-global.gif", gif((13, 11), full, rows, 4, grey))
    add("gif-grey-global-transparent.gif", gif((13, 11), full, rows, 4, grey, transparent=3))
    add("gif-grey-local.gif", gif((13, 11), full, rows, 4, None, grey))
    add("gif-grey-local-colour-global.gif", gif((13, 11), full, rows, 4, table(16), grey))
    add("gif-grey-local-colour-global-transparent.gif", gif((13, 11), full, rows, 4, table(16), grey, transparent=3))
    add("gif-colour-local-grey-global.gif", gif((13, 11), full, rows, 4, grey, table(16)))
    add("gif-no-palette.gif", gif((13, 11), full, rows, 4))
    add("gif-short-palette.gif", gif((13, 11), full, rows, 4, table(8)))
    add("gif-transparent-behind-palette.gif", gif((13, 11), full, rows, 4, table(8), transparent=12))
    add("gif-transparent-unused.gif", gif((13, 11), full, rows, 4, table(16), transparent=200))
    add("gif-disposal3.gif", gif((20, 18), (4, 3, 13, 11), rows, 4, table(16), disposal=3))
    add("gif-small-blocks.gif", gif((13, 11), full, rows, 4, table(16), block=3))
    add("gif-comment.gif", gif((13, 11), full, rows, 4, table(16), before=b"!\xfe\5hello\0!\xfe\0"))
    add("gif-application.gif", gif((13, 11), full, rows, 4, table(16), before=b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0"))
    add("gif-unknown-bytes.gif", gif((13, 11), full, rows, 4, table(16), before=b"\0\1\2"))
    add("gif-no-trailer.gif", gif((13, 11), full, rows, 4, table(16), end=b""))
    add("gif-trailing-bytes.gif", gif((13, 11), full, rows, 4, table(16)) + b"trailing")
    data = lzw([value for row in rows for value in row], 4)
    add("gif-data-too-long.gif", gif((13, 11), full, rows, 4, table(16), data=lzw([value for row in rows * 2 for value in row], 4)))
    add("gif-data-too-short.gif", gif((13, 11), full, rows, 4, table(16), data=lzw([value for row in rows[:5] for value in row], 4)))
    add("gif-data-cut-off.gif", gif((13, 11), full, rows, 4, table(16), data=data[: len(data) // 2]))
    add("gif-no-end-code.gif", gif((13, 11), full, rows, 4, table(16), data=data[:-1] + b"\0"))
    add("gif-bad-code.gif", gif((13, 11), full, rows, 4, table(16), data=data[:20] + b"\xff\xff\xff" + data[23:]), PARTIAL, refused=True)
    add("gif-bad-code-size.gif", gif((13, 11), full, rows, 4, table(16), data=data).replace(b"\x0b\0\0\4", b"\x0b\0\0\x0d"), PARTIAL, refused=True)
    add("gif-empty-frame.gif", gif((13, 11), (0, 0, 0, 11), rows, 4, table(16)))
    add("gif-no-frame.gif", b"GIF89a\x0d\0\x0b\0\0\0\0;")
    whole = save(image, "GIF")
    for cut in (6, 12, 13, 400, 781, 790, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        add(f"gif-cut-at-{cut}.gif", whole[:cut])
    add("gif-bomb.gif", gif((65535, 65535), full, rows, 4, table(16)))


# --- BMP -------------------------------------------------------------------------------------------------------------


def bmp_rows(width, height, bits):
    value = samples(bits, (1 << min(bits, 8)) - 1)
    if bits <= 8:
        return [pack_samples([value(x, y) for x in range(width)], bits) for y in range(height)]
    return [bytes(value(x, y, c) for x in range(width) for c in range(bits // 8)) for y in range(height)]


def bmp_palette(entries, entry=4):
    return b"".join(palette_bytes(entries)[3 * i : 3 * i + 3] + b"\0" * (entry - 3) for i in range(entries))


def grey_palette(entries, entry=4):
    values = [0, 255] if entries == 2 else range(entries)
    return b"".join(bytes([value] * 3) + b"\0" * (entry - 3) for value in values)


def bmp_cases():
    for width, height in SIZES:
        image = picture(width, height)
        for mode in ("1", "L", "P", "RGB", "RGBA"):
            source = with_alpha(image) if mode == "RGBA" else image.convert(mode)
            add(f"bmp-saved-{mode.lower()}-{width}x{height}.bmp", save(source, "BMP"))
    for bits in (1, 4, 8, 16, 24, 32):
        palette = bmp_palette(1 << bits) if bits <= 8 else b""
        rows = bmp_rows(13, 7, bits)
        for top_down in (False, True):
            add(f"bmp-{bits}-bits{'-top-down' if top_down else ''}.bmp", bmp(13, 7, bits, rows, palette, top_down=top_down))
        core = bmp_palette(1 << bits, 3) if bits <= 8 else b""
        add(f"bmp-{bits}-bits-core.bmp", bmp(13, 7, bits, rows, core, header=12))
        for header in (52, 56, 64, 108, 124):
            add(f"bmp-{bits}-bits-header{header}.bmp", bmp(13, 7, bits, rows, palette, header=header))
    # With four bits, Pillow takes a grey palette for bytes and finds the rows too short.
    for bits, refused in ((1, {}), (4, {"note": PARTIAL, "refused": True}), (8, {})):
        add(f"bmp-{bits}-bits-grey.bmp", bmp(13, 7, bits, bmp_rows(13, 7, bits), grey_palette(1 << bits)), **refused)
    add("bmp-4-bits-grey-padded.bmp", bmp(2, 7, 4, bmp_rows(2, 7, 4), grey_palette(16)))
    add("bmp-8-bits-black-white.bmp", bmp(13, 7, 8, bmp_rows(13, 7, 8), grey_palette(2), colours=2))
    add("bmp-8-bits-20-colours.bmp", bmp(13, 7, 8, bmp_rows(13, 7, 8), bmp_palette(20), colours=20))
    add("bmp-8-bits-300-colours.bmp", bmp(13, 7, 8, bmp_rows(13, 7, 8), bmp_palette(300), colours=300))
    add("bmp-4-bits-one-colour.bmp", bmp(13, 7, 4, bmp_rows(13, 7, 4), bmp_palette(1), colours=1))
    add("bmp-1-bit-inverted.bmp", bmp(13, 7, 1, bmp_rows(13, 7, 1), b"\xff\xff\xff\0\0\0\0\0"))
    masks = {
        "bgrx": (32, (0xFF0000, 0xFF00, 0xFF, 0)),
        "xbgr": (32, (0xFF000000, 0xFF0000, 0xFF00, 0)),
        "bgxr": (32, (0xFF000000, 0xFF00, 0xFF, 0)),
        "abgr": (32, (0xFF000000, 0xFF0000, 0xFF00, 0xFF)),
        "rgba": (32, (0xFF, 0xFF00, 0xFF0000, 0xFF000000)),
        "bgra": (32, (0xFF0000, 0xFF00, 0xFF, 0xFF000000)),
        "bgar": (32, (0xFF000000, 0xFF00, 0xFF, 0xFF0000)),
        "none": (32, (0, 0, 0, 0)),
        "odd": (32, (0xFF, 0xFF00, 0xFF0000, 0)),
        "24": (24, (0xFF0000, 0xFF00, 0xFF, 0)),
        "24-odd": (24, (0xFF, 0xFF00, 0xFF0000, 0)),
        "565": (16, (0xF800, 0x7E0, 0x1F, 0)),
        "555": (16, (0x7C00, 0x3E0, 0x1F, 0)),
        "444": (16, (0xF00, 0xF0, 0xF, 0)),
    }
    for name, (bits, values) in masks.items():
        rows = bmp_rows(13, 7, bits)
        for header in (40, 52, 56, 108):
            add(f"bmp-masks-{name}-header{header}.bmp", bmp(13, 7, bits, rows, header=header, compression=3, masks=values[:3] if header < 56 else values))
    # Run lengths: runs, literals, ends of lines, jumps.
    rle8 = b"\5\1\3\2\0\3\7\x08\x09\0\1\4\1\5\0\0" + b"\x0d\6\0\0" + b"\2\7\0\2\3\1\2\x09\0\0" + b"\0\4\1\2\3\4\x08\5\0\0" + b"\x0d\x0b\0\0" + b"\x20\3\0\0" + b"\x0d\1\0\1"
    rle4 = b"\5\x12\3\x34\0\5\x56\x78\x90\0\0\0" + b"\x0d\x67\0\0" + b"\2\x7a\0\2\3\1\2\x9b\0\0" + b"\0\4\x12\x34\x08\x5c\0\0" + b"\x0d\xbd\0\0" + b"\x20\x3e\0\0" + b"\x0d\x1f\0\1"
    for bits, kind, data in ((8, 1, rle8), (4, 2, rle4)):
        palette = bmp_palette(1 << bits)
        add(f"bmp-rle{bits}.bmp", bmp(13, 7, bits, data, palette, compression=kind))
        add(f"bmp-rle{bits}-top-down.bmp", bmp(13, 7, bits, data, palette, compression=kind, top_down=True))
        add(f"bmp-rle{bits}-grey.bmp", bmp(13, 7, bits, data, grey_palette(1 << bits), compression=kind))
        add(f"bmp-rle{bits}-no-end.bmp", bmp(13, 7, bits, data[:-2], palette, compression=kind))
        add(f"bmp-rle{bits}-too-short.bmp", bmp(13, 7, bits, data[:40], palette, compression=kind))
        add(f"bmp-rle{bits}-cut-off.bmp", bmp(13, 7, bits, data[:39], palette, compression=kind))
        add(f"bmp-rle{bits}-black-white.bmp", bmp(13, 7, bits, data, grey_palette(2), compression=kind, colours=2))
        add(f"bmp-rle{bits}-no-palette.bmp", bmp(13, 7, 24, data, compression=kind))
    rows = bmp_rows(13, 7, 24)
    whole = bmp(13, 7, 24, rows)
    for cut in (2, 14, 30, 53, 54, 100, len(whole) - 2, len(whole) - 1):
        add(f"bmp-cut-at-{cut}.bmp", whole[:cut])
    add("bmp-trailing-bytes.bmp", whole + b"trailing")
    add("bmp-gap-before-pixels.bmp", bmp_with_offset(whole, 54 + 10, bytes(10)))
    add("bmp-offset-zero.bmp", bmp_with_offset(whole, 0, b""))
    add("bmp-bad-bits.bmp", bmp(13, 7, 5, bmp_rows(13, 7, 8)))
    add("bmp-bad-header.bmp", bmp(13, 7, 24, rows, header=41))
    add("bmp-jpeg-inside.bmp", bmp(13, 7, 24, rows, compression=4))
    add("bmp-zero-width.bmp", bmp(0, 7, 24, rows))
    add("bmp-bomb.bmp", bmp(60000, 60000, 24, b"few pixels"))


def bmp_with_offset(data, offset, gap):
    return data[:10] + struct.pack("<I", offset) + data[14:54] + gap + data[54:]


# --- all -------------------------------------------------------------------------------------------------------------


def other_cases():
    image = picture(13, 7)
    for form, extension in (("TIFF", "tiff"), ("AVIF", "avif"), ("ICO", "ico"), ("JPEG2000", "jp2")):
        add(f"other.{extension}", save(image, form), "vLLM reads this format, Chiasm does not", refused=True)
    add("other.html", b"<!doctype html><title>404</title>")
    add("other-empty", b"")
    add("other-one-byte", b"\x89")


def outcome(data):
    try:
        media = ImageMediaIO().load_bytes(data).media
    except Exception as error:
        return {"error": type(error).__name__}
    assert media.mode == "RGB"
    return {"width": media.width, "height": media.height, "rgb_blake3": blake3.blake3(media.tobytes()).hexdigest()}


def stored(data):
    try:
        with Image.open(io.BytesIO(data)) as image:
            return {"format": image.format, "mode": image.mode}
    except Exception:
        return {}


def main():
    for make in (png_cases, jpeg_cases, orientation_cases, webp_cases, gif_cases, bmp_cases, other_cases):
        make()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    entries = []
    for name, (data, note, refused, same_as) in cases.items():
        entry = {"file": name, **stored(data)}
        vllm_says = outcome(data)
        if refused:
            assert "error" not in vllm_says, f"{name}: vLLM refuses it as well: {vllm_says}"
            entry |= {"error": "refused", "note": note}
        elif same_as is not None:
            assert "error" in vllm_says, f"{name}: vLLM takes it as well"
            entry |= {**outcome(same_as), "note": note}
        else:
            entry |= vllm_says
        (OUT / name).write_bytes(data)
        entries.append(entry)
    made_with = {
        "vllm": vllm.__version__,
        "pillow": PIL.__version__,
        "libjpeg_turbo": features.version("libjpeg_turbo"),
        "webp": features.version("webp"),
        "zlib": features.version("zlib"),
        "zlib_ng": features.version("zlib_ng"),
        "opencv": cv2.__version__,
        "numpy": np.__version__,
    }
    lines = ",\n".join("    " + json.dumps(entry) for entry in entries)
    index = f'{{\n  "made_with": {json.dumps(made_with)},\n  "images": [\n{lines}\n  ]\n}}\n'
    (OUT / "index.json").write_text(index)
    total = sum(path.stat().st_size for path in OUT.iterdir())
    errors = sum("error" in entry for entry in entries)
    print(f"{len(entries)} images, {errors} of them errors, {total} bytes")


if __name__ == "__main__":
    main()
