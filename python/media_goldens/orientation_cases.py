"""Rotated fixtures: the places of the orientation in JPEG, PNG and WebP, and their precedence."""

import struct
import zlib

from cases import add
from pictures import palette_bytes, picture, png_pixel, save, with_alpha
from writers import chunk, exif, jpeg_segment, png, riff_chunks, vp8x, webp, with_segments, xmp


def add_all():
    """Adds all fixtures with an orientation."""
    image = picture(21, 13)
    jpeg = save(image, "JPEG", quality=90)
    webp_still = save(image, "WEBP", quality=80)
    webp_lossless = save(with_alpha(image), "WEBP", lossless=True)
    pixel = png_pixel(8, 2)
    app1 = lambda content: jpeg_segment(0xE1, content)
    extended = lambda source, flags, *more: webp(
        [(b"VP8X", vp8x(flags, 21, 13)), *riff_chunks(source), *more]
    )
    for value in range(10):
        add(
            f"exif-{value}.jpg",
            with_segments(jpeg, app1(b"Exif\0\0" + exif(value, little=value % 2 == 0))),
        )
        add(
            f"exif-{value}.png",
            png(21, 13, 8, 2, pixel, [chunk(b"eXIf", exif(value, little=value % 2 == 1))]),
        )
        add(f"exif-{value}.webp", extended(webp_still, 8, (b"EXIF", exif(value))))
        add(
            f"exif-{value}-alpha.webp",
            extended(webp_lossless, 0x18, (b"EXIF", b"Exif\0\0" + exif(value))),
        )
    exif6, exif3 = exif(6), exif(3)
    app_exif = lambda tiff: app1(b"Exif\0\0" + tiff)
    app_xmp = lambda packet: app1(b"http://ns.adobe.com/xap/1.0/\0" + packet)
    # The places of the orientation, and their precedence.
    add("exif-grey.jpg", with_segments(save(image.convert("L"), "JPEG"), app_exif(exif6)))
    add("exif-cmyk.jpg", with_segments(save(image.convert("CMYK"), "JPEG"), app_exif(exif(8))))
    palette = [chunk(b"PLTE", palette_bytes(16)), chunk(b"tRNS", b"\0\x80")]
    add(
        "exif-palette.png",
        png(21, 13, 4, 3, png_pixel(4, 3), [*palette, chunk(b"eXIf", exif(5))]),
    )
    add("exif-grey16.png", png(21, 13, 16, 0, png_pixel(16, 0), [chunk(b"eXIf", exif(7))]))
    add(
        "exif-bit-adam7.png",
        png(21, 13, 1, 0, png_pixel(1, 0), [chunk(b"eXIf", exif(6))], interlaced=True),
    )
    add("exif-twice-prefixed.jpg", with_segments(jpeg, app1(b"Exif\0\0Exif\0\0" + exif6)))
    add("exif-two-segments.jpg", with_segments(jpeg, app_exif(exif6), app_exif(exif3)))
    add("exif-split.jpg", with_segments(jpeg, app_exif(exif6[:14]), app_exif(exif6[14:])))
    add("exif-behind-frame.jpg", insert_after_frame(jpeg, app_exif(exif6)))
    add("exif-no-jfif.jpg", jpeg[:2] + app_exif(exif6) + jpeg[jpeg.index(b"\xff\xdb") :])
    add(
        "exif-no-jfif-unreadable.jpg",
        jpeg[:2] + app_exif(b"II*\0") + app_xmp(xmp(6)) + jpeg[jpeg.index(b"\xff\xdb") :],
    )
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
    add(
        "exif-unknown-type-before.jpg",
        with_segments(jpeg, app_exif(exif(6, more=[(256, 99, 1, b"\1\0\0\0")]))),
    )
    add(
        "exif-value-behind-end-before.jpg",
        with_segments(jpeg, app_exif(exif(6, more=[(256, 3, 9, b"\xf0\0\0\0")])), app_xmp(xmp(8))),
    )
    add(
        "exif-value-too-long-before.jpg",
        with_segments(jpeg, app_exif(exif(6, more=[(256, 3, 9999, b"\x08\0\0\0")]))),
    )
    add(
        "exif-tag-twice.jpg",
        with_segments(jpeg, app_exif(exif(6, more=[(274, 3, 1, b"\3\0\0\0")]))),
    )
    for as_element in (False, True):
        packet = xmp(6, as_element)
        kind = "element" if as_element else "attribute"
        add(f"xmp-{kind}.jpg", with_segments(jpeg, app_xmp(packet)))
        add(
            f"xmp-{kind}.png",
            png(21, 13, 8, 2, pixel, [chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + packet)]),
        )
        add(f"xmp-{kind}.webp", extended(webp_still, 4, (b"XMP ", packet)))
    add("xmp-two-packets.jpg", with_segments(jpeg, app_xmp(xmp(6)), app_xmp(xmp(3))))
    add("xmp-and-exif.jpg", with_segments(jpeg, app_xmp(xmp(6)), app_exif(exif3)))
    add(
        "xmp-and-exif-without.jpg",
        with_segments(jpeg, app_xmp(xmp(6)), app_exif(b"II*\0\x08\0\0\0\0\0\0\0\0\0")),
    )
    text = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(6))
    add("xmp-compressed.png", png(21, 13, 8, 2, pixel, [chunk(b"iTXt", text)]))
    add(
        "xmp-broken-compression.png",
        png(21, 13, 8, 2, pixel, [chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0nonsense")]),
    )
    add(
        "xmp-not-utf8.png",
        png(21, 13, 8, 2, pixel, [chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0\xff" + xmp(6))]),
    )
    add(
        "xmp-as-text.png",
        png(21, 13, 8, 2, pixel, [chunk(b"tEXt", b"XML:com.adobe.xmp\0" + xmp(6))]),
    )
    add("xmp-as-other-text.png", png(21, 13, 8, 2, pixel, [chunk(b"tEXt", b"xmp\0" + xmp(6))]))
    add("exif-behind-data.png", png(21, 13, 8, 2, pixel, after=[chunk(b"eXIf", exif6)]))
    add(
        "exif-behind-data-refused-text.png",
        png(21, 13, 8, 2, pixel, [chunk(b"eXIf", exif6)], [chunk(b"gAMA", b"x")]),
    )
    add(
        "exif-before-iend-missing.png",
        png(21, 13, 8, 2, pixel, after=[chunk(b"eXIf", exif6)], end=False),
    )
    add(
        "exif-twice.png", png(21, 13, 8, 2, pixel, [chunk(b"eXIf", exif6)], [chunk(b"eXIf", exif3)])
    )
    app1_exif6 = b"Exif\0\0" + exif6
    profile = b"\nexif\n%8d\n" % len(app1_exif6) + app1_exif6.hex().encode() + b"\n"
    raw_profile = chunk(b"tEXt", b"Raw profile type exif\0" + profile)
    add("exif-raw-profile.png", png(21, 13, 8, 2, pixel, [raw_profile]))
    text = b"Raw profile type exif\0\0" + zlib.compress(profile)
    add("exif-raw-profile-compressed.png", png(21, 13, 8, 2, pixel, [chunk(b"zTXt", text)]))
    add(
        "exif-raw-profile-bad.png",
        png(21, 13, 8, 2, pixel, [chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 3\nxyz\n")]),
    )
    add(
        "exif-raw-profile-and-chunk.png",
        png(21, 13, 8, 2, pixel, [raw_profile, chunk(b"eXIf", exif3)]),
    )
    add("exif-as-text.png", png(21, 13, 8, 2, pixel, [chunk(b"tEXt", b"exif\0" + exif6)]))
    add(
        "exif-as-compressed-text.png",
        png(21, 13, 8, 2, pixel, [chunk(b"zTXt", b"exif\0\0" + zlib.compress(exif6))]),
    )
    add("exif-without-flag.webp", extended(webp_still, 0, (b"EXIF", exif6)))
    add(
        "exif-before-image.webp",
        webp([(b"VP8X", vp8x(8, 21, 13)), (b"EXIF", exif6), *riff_chunks(webp_still)]),
    )
    add("exif-twice.webp", extended(webp_still, 8, (b"EXIF", exif6), (b"EXIF", exif3)))
    add("exif-odd-length.webp", extended(webp_still, 8, (b"EXIF", exif6 + b"x")))
    add("exif-in-simple-file.webp", webp([*riff_chunks(webp_still), (b"EXIF", exif6)]))


def insert_after_frame(jpeg, segment):
    at = jpeg.index(b"\xff\xc0")
    at += 2 + struct.unpack(">H", jpeg[at + 2 : at + 4])[0]
    return jpeg[:at] + segment + jpeg[at:]
