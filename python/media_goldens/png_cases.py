"""PNG fixtures: all sample layouts, transparency, filters, broken data and chunks, and APNG."""

import struct
import zlib

from cases import PARTIALLY_DECODED, add
from pictures import SIZES, palette_bytes, png_pixel
from writers import CHANNELS, chunk, exif, png, png_rows

PNG_LAYOUTS = [
    (d, c)
    for c, ds in {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}.items()
    for d in ds
]
COLOURS = {0: "grey", 2: "rgb", 3: "palette", 4: "grey-alpha", 6: "rgba"}


def add_all():
    """Adds all PNG fixtures."""
    for depth, colour in PNG_LAYOUTS:
        plte = [chunk(b"PLTE", palette_bytes(1 << depth))] if colour == 3 else []
        for width, height in SIZES:
            for interlaced in (False, True):
                suffix = "-adam7" if interlaced else ""
                pixel = png_pixel(depth, colour)
                add(
                    f"png-{COLOURS[colour]}{depth}-{width}x{height}{suffix}.png",
                    png(width, height, depth, colour, pixel, plte, interlaced=interlaced),
                )
    # 16-bit grey around the value where Pillow clips, and with a transparent grey whose high byte
    # Pillow drops.
    ramp = lambda x, y: [x * 3 + y * 97]
    add("png-grey16-clip.png", png(100, 6, 16, 0, ramp))
    for grey in (40, 255, 0x0128):
        add(
            f"png-grey16-trns{grey}.png",
            png(100, 6, 16, 0, ramp, [chunk(b"tRNS", struct.pack(">H", grey))]),
        )
    for depth in (1, 2, 4, 8):
        for grey in sorted({0, 1, (1 << depth) - 1, 0x155, 0xAA}):
            trns = [chunk(b"tRNS", struct.pack(">H", grey))]
            add(f"png-grey{depth}-trns{grey}.png", png(37, 9, depth, 0, png_pixel(depth, 0), trns))
    for values in [(255, 3, 4), (0x1FF, 0x203, 0x104), (254, 3, 4)]:
        trns = [chunk(b"tRNS", struct.pack(">HHH", *values))]
        name = "-".join(map(str, values))
        add(f"png-rgb8-trns{name}.png", png(16, 16, 8, 2, lambda x, y: [255, x, y], trns))
        add(
            f"png-rgb16-trns{name}.png",
            png(16, 16, 16, 2, lambda x, y: [0xFF12, x << 8 | 3, y << 8], trns),
        )
    add(
        "png-rgb8-trns-truncated.png",
        png(16, 16, 8, 2, lambda x, y: [255, x, y], [chunk(b"tRNS", b"\0\xff\0\3\0")]),
    )
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
            add(
                f"png-palette{depth}-trns-{what}.png",
                png(37, 9, depth, 3, png_pixel(depth, 3), [table, chunk(b"tRNS", trns)]),
            )
    pixel = png_pixel(8, 3)
    add("png-palette8-short.png", png(37, 9, 8, 3, pixel, [chunk(b"PLTE", palette_bytes(20))]))
    add("png-palette8-no-plte.png", png(37, 9, 8, 3, pixel))
    add(
        "png-palette8-odd-plte.png",
        png(37, 9, 8, 3, pixel, [chunk(b"PLTE", palette_bytes(20)[:-1])]),
    )
    add("png-palette8-long-plte.png", png(37, 9, 8, 3, pixel, [chunk(b"PLTE", palette_bytes(257))]))
    plte = chunk(b"PLTE", palette_bytes(256))
    trns = chunk(b"tRNS", bytes(range(256)) + b"\1")
    add("png-palette8-long-trns.png", png(37, 9, 8, 3, pixel, [plte, trns]))
    trns = chunk(b"tRNS", b"\x80\x10")
    add("png-palette8-trns-before-plte.png", png(37, 9, 8, 3, pixel, [trns, plte]))
    add("png-palette8-trns-behind-data.png", png(37, 9, 8, 3, pixel, [plte], [trns]))
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
    unknown = [chunk(b"prVt", b"x"), chunk(b"ABCD", b"y")]
    add("png-unknown-chunks.png", png(37, 23, 8, 2, pixel, unknown, [chunk(b"wxYz", b"z")]))
    ancillary = [
        chunk(b"gAMA", struct.pack(">I", 45455)),
        chunk(b"sRGB", b"\0"),
        chunk(b"pHYs", struct.pack(">IIB", 1, 1, 1)),
        chunk(b"iCCP", b"x\0\0" + zlib.compress(b"profile")),
        chunk(b"bKGD", bytes(6)),
    ]
    add("png-ancillary.png", png(7, 5, 8, 2, png_pixel(8, 2), ancillary))
    compressed = zlib.compress(raw)
    add(
        "png-wrong-adler.png",
        png(37, 23, 8, 2, None, data=compressed[:-4] + b"\0\0\0\0"),
        PARTIALLY_DECODED,
        refused=True,
    )
    add("png-data-too-long.png", png(37, 23, 8, 2, None, data=zlib.compress(raw + bytes(1000))))
    add("png-data-too-short.png", png(37, 23, 8, 2, None, data=zlib.compress(raw[: 10 * 112])))
    add(
        "png-data-too-short-by-a-byte.png",
        png(37, 23, 8, 2, None, data=zlib.compress(raw[: 10 * 112 - 1])),
    )
    for colour in (0, 3, 4, 6):
        before = [chunk(b"PLTE", palette_bytes(256))] if colour == 3 else []
        short = zlib.compress(png_rows(png_pixel(8, colour), 37, 9, 8, colour))
        add(
            f"png-data-too-short-{COLOURS[colour]}.png",
            png(37, 23, 8, colour, None, before, data=short),
        )
        short = zlib.compress(
            png_rows(png_pixel(8, colour), 8, 8, 8, colour, True)[: 2 * (1 + CHANNELS[colour])]
        )
        add(
            f"png-data-too-short-{COLOURS[colour]}-adam7.png",
            png(8, 8, 8, colour, None, before, interlaced=True, data=short),
        )
    add("png-data-cut-off.png", png(37, 23, 8, 2, None, data=compressed[: len(compressed) // 2]))
    broken = bytearray(compressed)
    broken[len(broken) // 2] ^= 0x55
    broken[len(broken) // 2 + 1] ^= 0xAA
    add(
        "png-data-broken.png",
        png(37, 23, 8, 2, None, data=bytes(broken)),
        PARTIALLY_DECODED,
        refused=True,
    )
    # A deflate block of type 3 does not exist.
    add(
        "png-data-bad-block.png",
        png(37, 23, 8, 2, None, data=b"\x78\x9c\x07" + bytes(9)),
        PARTIALLY_DECODED,
        refused=True,
    )
    add(
        "png-data-no-zlib.png",
        png(37, 23, 8, 2, None, data=b"no zlib data here"),
        PARTIALLY_DECODED,
        refused=True,
    )
    add(
        "png-data-bad-filter.png",
        png(37, 23, 8, 2, None, data=zlib.compress(raw[:1120] + b"\5" + raw[1121:])),
        PARTIALLY_DECODED,
        refused=True,
    )
    whole = png(37, 23, 8, 2, pixel)
    add("png-idat-wrong-crc.png", whole[:-16] + b"\0\0\0\0" + whole[-12:])
    size = len(whole)
    for cut in (4, 8, 16, 33, 40, 60, size // 2, size - 17, size - 12, size - 4):
        add(f"png-cut-at-{cut}.png", whole[:cut])
    add("png-wrong-ihdr-crc.png", whole[:29] + b"\0\0\0\0" + whole[33:])
    add(
        "png-wrong-text-crc.png", png(7, 5, 8, 2, png_pixel(8, 2), [chunk(b"tEXt", b"a\0b", crc=1)])
    )
    add(
        "png-wrong-text-crc-behind-data.png",
        png(7, 5, 8, 2, png_pixel(8, 2), after=[chunk(b"tEXt", b"a\0b", crc=1)]),
    )
    add("png-zero-width.png", png(0, 5, 8, 2, None, data=b""))
    add("png-zero-height.png", png(5, 0, 8, 2, None, data=b""))
    add("png-bad-depth.png", png(7, 5, 3, 2, None, data=compressed))
    add(
        "png-bad-filter-method.png",
        whole[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", 37, 23, 8, 2, 0, 1, 0)) + whole[33:],
    )
    add("png-no-idat.png", png(7, 5, 8, 2, None, data=b"", idat=1))
    add("png-bomb.png", png(60000, 60000, 8, 0, None, data=zlib.compress(bytes(100))))
    bomb = b"k\0\0" + zlib.compress(bytes(2 << 20), 9)
    add("png-bomb-text.png", png(7, 5, 8, 2, png_pixel(8, 2), [chunk(b"zTXt", bomb)]))
    add("png-bomb-icc.png", png(7, 5, 8, 2, png_pixel(8, 2), [chunk(b"iCCP", bomb)]))
    # Animations: the default image is decoded.
    actl = lambda frames: chunk(b"acTL", struct.pack(">II", frames, 0))
    fctl = lambda seq, w=37, h=23, x=0, y=0: chunk(
        b"fcTL", struct.pack(">IIIIIHHBB", seq, w, h, x, y, 1, 10, 0, 0)
    )
    fdat = lambda seq: chunk(
        b"fdAT", struct.pack(">I", seq) + zlib.compress(png_rows(png_pixel(8, 2), 37, 23, 8, 2))
    )
    orient6 = chunk(b"eXIf", exif(6))
    add(
        "apng-first-frame-is-default.png",
        png(37, 23, 8, 2, pixel, [actl(2), fctl(0)], [fctl(1), fdat(2)]),
    )
    add("apng-default-image.png", png(37, 23, 8, 2, pixel, [actl(1)], [fctl(0), fdat(1)]))
    add(
        "apng-exif-behind-frames.png",
        png(37, 23, 8, 2, pixel, [actl(2), fctl(0)], [fctl(1), fdat(2), orient6]),
    )
    add("apng-one-frame-exif-behind.png", png(37, 23, 8, 2, pixel, [actl(1), fctl(0)], [orient6]))
    add("apng-bad-sequence.png", png(37, 23, 8, 2, pixel, [actl(2), fctl(1)]))
    add("apng-bad-sequence-behind.png", png(37, 23, 8, 2, pixel, [fctl(0)], [orient6, fctl(5)]))
    add("apng-frame-too-large.png", png(37, 23, 8, 2, pixel, [actl(2), fctl(0, 38, 23)]))
    add(
        "apng-first-frame-is-small.png",
        png(37, 23, 8, 2, pixel, [actl(2), fctl(0, 30, 20)]),
        "an animation whose first frame does not fill the image breaks the format's rules",
        refused=True,
    )
