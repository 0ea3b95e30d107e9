"""BMP fixtures: all depths and headers, colour masks, run lengths, and Pillow's grey palettes."""

import struct

from cases import PARTIALLY_DECODED, add
from pictures import SIZES, palette_bytes, picture, samples, save, with_alpha
from writers import bmp, pack_samples


def bmp_rows(width, height, bits):
    value = samples(bits, (1 << min(bits, 8)) - 1)
    if bits <= 8:
        return [pack_samples([value(x, y) for x in range(width)], bits) for y in range(height)]
    return [
        bytes(value(x, y, c) for x in range(width) for c in range(bits // 8)) for y in range(height)
    ]


def bmp_palette(entries, entry=4):
    return b"".join(
        palette_bytes(entries)[3 * i : 3 * i + 3] + b"\0" * (entry - 3) for i in range(entries)
    )


def grey_palette(entries, entry=4):
    values = [0, 255] if entries == 2 else range(entries)
    return b"".join(bytes([value] * 3) + b"\0" * (entry - 3) for value in values)


def add_all():
    """Adds all BMP fixtures."""
    for width, height in SIZES:
        image = picture(width, height)
        for mode in ("1", "L", "P", "RGB", "RGBA"):
            source = with_alpha(image) if mode == "RGBA" else image.convert(mode)
            add(f"bmp-saved-{mode.lower()}-{width}x{height}.bmp", save(source, "BMP"))
    for bits in (1, 4, 8, 16, 24, 32):
        palette = bmp_palette(1 << bits) if bits <= 8 else b""
        rows = bmp_rows(13, 7, bits)
        for top_down in (False, True):
            add(
                f"bmp-{bits}-bits{'-top-down' if top_down else ''}.bmp",
                bmp(13, 7, bits, rows, palette, top_down=top_down),
            )
        core = bmp_palette(1 << bits, 3) if bits <= 8 else b""
        add(f"bmp-{bits}-bits-core.bmp", bmp(13, 7, bits, rows, core, header=12))
        for header in (52, 56, 64, 108, 124):
            add(
                f"bmp-{bits}-bits-header{header}.bmp",
                bmp(13, 7, bits, rows, palette, header=header),
            )
    # With four bits, Pillow treats a grey palette as 8-bit grey, and then the rows are too short.
    for bits, refused in ((1, {}), (4, {"note": PARTIALLY_DECODED, "refused": True}), (8, {})):
        add(
            f"bmp-{bits}-bits-grey.bmp",
            bmp(13, 7, bits, bmp_rows(13, 7, bits), grey_palette(1 << bits)),
            **refused,
        )
    add("bmp-4-bits-grey-padded.bmp", bmp(2, 7, 4, bmp_rows(2, 7, 4), grey_palette(16)))
    add("bmp-8-bits-black-white.bmp", bmp(13, 7, 8, bmp_rows(13, 7, 8), grey_palette(2), colours=2))
    add("bmp-8-bits-20-colours.bmp", bmp(13, 7, 8, bmp_rows(13, 7, 8), bmp_palette(20), colours=20))
    add(
        "bmp-8-bits-300-colours.bmp",
        bmp(13, 7, 8, bmp_rows(13, 7, 8), bmp_palette(300), colours=300),
    )
    add("bmp-4-bits-one-colour.bmp", bmp(13, 7, 4, bmp_rows(13, 7, 4), bmp_palette(1), colours=1))
    add("bmp-1-bit-inverted.bmp", bmp(13, 7, 1, bmp_rows(13, 7, 1), b"\xff\xff\xff\0\0\0\0\0"))
    layouts = {
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
    for name, (bits, values) in layouts.items():
        rows = bmp_rows(13, 7, bits)
        for header in (40, 52, 56, 108):
            masks = values[:3] if header < 56 else values
            add(
                f"bmp-masks-{name}-header{header}.bmp",
                bmp(13, 7, bits, rows, header=header, compression=3, masks=masks),
            )
    # Run-length encoding: runs, literals, ends of lines, jumps.
    rle8 = (
        b"\5\1\3\2\0\3\7\x08\x09\0\1\4\1\5\0\0"
        + b"\x0d\6\0\0"
        + b"\2\7\0\2\3\1\2\x09\0\0"
        + b"\0\4\1\2\3\4\x08\5\0\0"
        + b"\x0d\x0b\0\0"
        + b"\x20\3\0\0"
        + b"\x0d\1\0\1"
    )
    rle4 = (
        b"\5\x12\3\x34\0\5\x56\x78\x90\0\0\0"
        + b"\x0d\x67\0\0"
        + b"\2\x7a\0\2\3\1\2\x9b\0\0"
        + b"\0\4\x12\x34\x08\x5c\0\0"
        + b"\x0d\xbd\0\0"
        + b"\x20\x3e\0\0"
        + b"\x0d\x1f\0\1"
    )
    for bits, kind, data in ((8, 1, rle8), (4, 2, rle4)):
        palette = bmp_palette(1 << bits)
        add(f"bmp-rle{bits}.bmp", bmp(13, 7, bits, data, palette, compression=kind))
        add(
            f"bmp-rle{bits}-top-down.bmp",
            bmp(13, 7, bits, data, palette, compression=kind, top_down=True),
        )
        add(
            f"bmp-rle{bits}-grey.bmp",
            bmp(13, 7, bits, data, grey_palette(1 << bits), compression=kind),
        )
        add(f"bmp-rle{bits}-no-end.bmp", bmp(13, 7, bits, data[:-2], palette, compression=kind))
        add(f"bmp-rle{bits}-too-short.bmp", bmp(13, 7, bits, data[:40], palette, compression=kind))
        add(f"bmp-rle{bits}-cut-off.bmp", bmp(13, 7, bits, data[:39], palette, compression=kind))
        add(
            f"bmp-rle{bits}-black-white.bmp",
            bmp(13, 7, bits, data, grey_palette(2), compression=kind, colours=2),
        )
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
