"""JPEG fixtures: samplings, colour spaces, scans, and the damage that libjpeg only warns about."""

import struct

import cv2
import numpy as np

from cases import PARTIALLY_DECODED, add
from pictures import SIZES, picture, save
from writers import exif, jpeg_segment, with_segments

LIBJPEG_FILLS_UP = (
    "libjpeg fills up what is missing; "
    "Chiasm only does so for a single scan without restart markers"
)


def add_all():
    """Adds all JPEG fixtures."""
    for width, height in SIZES:
        image = picture(width, height)
        for sampling in ("4:4:4", "4:2:2", "4:2:0"):
            for progressive in (False, True):
                ratio = sampling.replace(":", "")
                suffix = "-progressive" if progressive else ""
                add(
                    f"jpeg-{ratio}-{width}x{height}{suffix}.jpg",
                    save(image, "JPEG", quality=75, subsampling=sampling, progressive=progressive),
                )
        add(f"jpeg-grey-{width}x{height}.jpg", save(image.convert("L"), "JPEG", quality=80))
        add(f"jpeg-cmyk-{width}x{height}.jpg", save(image.convert("CMYK"), "JPEG", quality=80))
    image = picture(61, 45)
    array = np.asarray(image)[..., ::-1]
    for sampling in (0x411111, 0x221111, 0x211111, 0x121111, 0x111111):
        for progressive in (0, 1):
            options = [
                cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
                sampling,
                cv2.IMWRITE_JPEG_PROGRESSIVE,
                progressive,
            ]
            add(
                f"jpeg-sampling{sampling:x}{'-progressive' if progressive else ''}.jpg",
                cv2.imencode(".jpg", array, options)[1].tobytes(),
            )
    # Luma with fewer samples than one of the chroma planes: only the sampling factors in the frame
    # header are changed.
    swapped = bytearray(save(image, "JPEG", subsampling="4:2:2"))
    frame = swapped.index(b"\xff\xc0") + 10
    swapped[frame + 1], swapped[frame + 4] = 0x11, 0x21
    add(
        "jpeg-first-component-subsampled.jpg",
        bytes(swapped),
        "the decoder reads no such files",
        refused=True,
    )
    for quality in (1, 30, 95, 100):
        add(f"jpeg-quality{quality}.jpg", save(image, "JPEG", quality=quality))
    add("jpeg-restarts.jpg", save(image, "JPEG", restart_marker_blocks=2))
    add("jpeg-optimised.jpg", save(image, "JPEG", optimize=True))
    add("jpeg-grey-progressive.jpg", save(image.convert("L"), "JPEG", progressive=True))
    add("jpeg-cmyk-progressive.jpg", save(image.convert("CMYK"), "JPEG", progressive=True))
    add("jpeg-keep-rgb.jpg", save(image, "JPEG", keep_rgb=True))
    add(
        "jpeg-comment-icc.jpg",
        save(image, "JPEG", comment=b"a comment", icc_profile=b"no profile", dpi=(300, 300)),
    )
    plain = save(image, "JPEG")
    # The transforms of the Adobe segment, for three and four components.
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
    # Errors, and damage that libjpeg only warns about.
    add(
        "jpeg-no-end.jpg",
        plain[:-2],
        "Pillow misses the end marker, but the image is complete without it",
        same_as=plain,
    )
    for share in (1, 5, 20, 50, 75, 90, 99):
        add(f"jpeg-cut-at-{share}.jpg", plain[: len(plain) * share // 100])
    for share in (50, 75, 95):
        add(f"jpeg-cut-at-{share}-eoi.jpg", plain[: len(plain) * share // 100] + b"\xff\xd9")
    progressive = save(image, "JPEG", progressive=True)
    for share in (20, 50, 90):
        add(f"jpeg-progressive-cut-at-{share}.jpg", progressive[: len(progressive) * share // 100])
        add(
            f"jpeg-progressive-cut-at-{share}-eoi.jpg",
            progressive[: len(progressive) * share // 100] + b"\xff\xd9",
            *((LIBJPEG_FILLS_UP, True) if share > 50 else ()),
        )
    scans = [at for at in range(len(progressive) - 1) if progressive[at : at + 2] == b"\xff\xda"]
    for number, at in list(enumerate(scans))[1:4]:
        # The next scan's tables are in front of its marker and stay in the file.
        add(f"jpeg-progressive-cut-behind-scan-{number}.jpg", progressive[:at])
        add(f"jpeg-progressive-cut-behind-scan-{number}-eoi.jpg", progressive[:at] + b"\xff\xd9")
    # Segments that are longer or shorter than their content, or out of range: libjpeg fails.
    for what, marker, change in (
        ("quantization-too-short", 0xDB, lambda content: content[:-1]),
        ("quantization-out-of-range", 0xDB, lambda content: b"\4" + content[1:]),
        ("huffman-out-of-range", 0xC4, lambda content: b"\4" + content[1:]),
        ("frame-too-long", 0xC0, lambda content: content + b"\0"),
        ("scan-too-long", 0xDA, lambda content: content + b"\0"),
    ):
        at = plain.index(bytes([0xFF, marker]))
        end = at + 2 + int.from_bytes(plain[at + 2 : at + 4], "big")
        file = plain[:at] + jpeg_segment(marker, change(plain[at + 4 : end])) + plain[end:]
        by_pillow = what in ("quantization-too-short", "frame-too-long")
        add(f"jpeg-{what}.jpg", file, *(() if by_pillow else (PARTIALLY_DECODED, True)))
    for what, segment in (
        ("restarts-too-long", jpeg_segment(0xDD, b"\0\0\0")),
        ("conditions-out-of-range", jpeg_segment(0xCC, b"\0\x01")),
        ("conditions-cut-off", jpeg_segment(0xCC, b"\0")),
    ):
        add(f"jpeg-{what}.jpg", with_segments(plain, segment), PARTIALLY_DECODED, refused=True)
    thumbnail = jpeg_segment(0xE1, b"Exif\0\0" + exif(6) + save(picture(7, 5), "JPEG"))
    add("jpeg-thumbnail.jpg", with_segments(plain, thumbnail))
    add(
        "jpeg-thumbnail-cut-off.jpg",
        with_segments(plain, thumbnail)[: len(thumbnail) + len(plain) // 2],
    )
    add(
        "jpeg-restarts-cut-off-eoi.jpg",
        save(image, "JPEG", restart_marker_blocks=2)[:1200] + b"\xff\xd9",
        LIBJPEG_FILLS_UP,
        refused=True,
    )
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
    add("jpeg-zero-height.jpg", with_zero_height(plain))
    add("jpeg-12-bit.jpg", patch_frame_header(plain, 0, 12))
    add("jpeg-2-components.jpg", patch_frame_header(plain, 5, 2))
    add(
        "jpeg-no-tables.jpg",
        plain[:2] + plain[plain.index(b"\xff\xc0") :],
        PARTIALLY_DECODED,
        refused=True,
    )
    add("jpeg-bomb.jpg", with_size(plain, 65500, 65500))


def patch_frame_header(jpeg, offset, value):
    jpeg, at = bytearray(jpeg), jpeg.index(b"\xff\xc0") + 4
    jpeg[at + offset] = value
    return bytes(jpeg)


def with_zero_height(jpeg):
    return patch_frame_header(patch_frame_header(jpeg, 1, 0), 2, 0)


def with_size(jpeg, width, height):
    jpeg, at = bytearray(jpeg), jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(jpeg)
