"""GIF fixtures: palettes of every size, frames that do not fill the screen, and broken LZW data."""

from cases import PARTIALLY_DECODED, add
from pictures import SIZES, palette_bytes, picture, samples, save
from writers import gif, lzw


def add_all():
    """Adds all GIF fixtures."""
    for width, height in SIZES:
        image = picture(width, height).quantize(64)
        add(f"gif-saved-{width}x{height}.gif", save(image, "GIF", interlace=0))
        add(f"gif-saved-{width}x{height}-interlaced.gif", save(image, "GIF", interlace=1))
    image = picture(61, 45).quantize(256)
    add("gif-256-colours.gif", save(image, "GIF"))
    add("gif-transparent.gif", save(image, "GIF", transparency=7))
    add("gif-grey.gif", save(picture(37, 23).convert("L"), "GIF"))
    frames = [picture(30, 20, seed).quantize(32) for seed in range(3)]
    add(
        "gif-animation.gif",
        save(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50, disposal=2),
    )
    table = palette_bytes
    for bits in range(1, 9):
        index = samples(bits, (1 << bits) - 1)
        rows = [[index(x, y) for x in range(13)] for y in range(11)]
        code = max(2, bits)
        add(f"gif-{bits}-bits.gif", gif((13, 11), (0, 0, 13, 11), rows, code, table(1 << bits)))
        add(
            f"gif-{bits}-bits-local.gif",
            gif((13, 11), (0, 0, 13, 11), rows, code, None, table(1 << bits), transparent=1),
        )
    index = samples(3, 15)
    rows = [[index(x, y) for x in range(13)] for y in range(11)]
    full = (0, 0, 13, 11)
    grey = bytes(value for i in range(16) for value in (i, i, i))
    add("gif-offset.gif", gif((20, 18), (4, 3, 13, 11), rows, 4, table(16)))
    add(
        "gif-offset-transparent.gif",
        gif((20, 18), (4, 3, 13, 11), rows, 4, table(16), transparent=5),
    )
    add(
        "gif-offset-interlaced.gif",
        gif((20, 18), (4, 3, 13, 11), rows, 4, table(16), interlaced=True),
    )
    add("gif-beyond-screen.gif", gif((10, 5), (4, 3, 13, 11), rows, 4, table(16)))
    add("gif-empty-screen.gif", gif((0, 0), full, rows, 4, table(16)))
    add("gif-local-and-global.gif", gif((13, 11), full, rows, 4, table(16)[::-1], table(16)))
    add("gif-grey-global.gif", gif((13, 11), full, rows, 4, grey))
    add("gif-grey-global-transparent.gif", gif((13, 11), full, rows, 4, grey, transparent=3))
    add("gif-grey-local.gif", gif((13, 11), full, rows, 4, None, grey))
    add("gif-grey-local-colour-global.gif", gif((13, 11), full, rows, 4, table(16), grey))
    add(
        "gif-grey-local-colour-global-transparent.gif",
        gif((13, 11), full, rows, 4, table(16), grey, transparent=3),
    )
    add("gif-colour-local-grey-global.gif", gif((13, 11), full, rows, 4, grey, table(16)))
    add("gif-no-palette.gif", gif((13, 11), full, rows, 4))
    add("gif-short-palette.gif", gif((13, 11), full, rows, 4, table(8)))
    add(
        "gif-transparent-behind-palette.gif", gif((13, 11), full, rows, 4, table(8), transparent=12)
    )
    add("gif-transparent-unused.gif", gif((13, 11), full, rows, 4, table(16), transparent=200))
    add("gif-disposal3.gif", gif((20, 18), (4, 3, 13, 11), rows, 4, table(16), disposal=3))
    add("gif-small-blocks.gif", gif((13, 11), full, rows, 4, table(16), block=3))
    add("gif-comment.gif", gif((13, 11), full, rows, 4, table(16), before=b"!\xfe\5hello\0!\xfe\0"))
    add(
        "gif-application.gif",
        gif((13, 11), full, rows, 4, table(16), before=b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0"),
    )
    add("gif-unknown-bytes.gif", gif((13, 11), full, rows, 4, table(16), before=b"\0\1\2"))
    add("gif-no-trailer.gif", gif((13, 11), full, rows, 4, table(16), end=b""))
    add("gif-trailing-bytes.gif", gif((13, 11), full, rows, 4, table(16)) + b"trailing")
    data = lzw([value for row in rows for value in row], 4)
    add(
        "gif-data-too-long.gif",
        gif(
            (13, 11),
            full,
            rows,
            4,
            table(16),
            data=lzw([value for row in rows * 2 for value in row], 4),
        ),
    )
    add(
        "gif-data-too-short.gif",
        gif(
            (13, 11),
            full,
            rows,
            4,
            table(16),
            data=lzw([value for row in rows[:5] for value in row], 4),
        ),
    )
    add(
        "gif-data-cut-off.gif", gif((13, 11), full, rows, 4, table(16), data=data[: len(data) // 2])
    )
    add("gif-no-end-code.gif", gif((13, 11), full, rows, 4, table(16), data=data[:-1] + b"\0"))
    add(
        "gif-bad-code.gif",
        gif((13, 11), full, rows, 4, table(16), data=data[:20] + b"\xff\xff\xff" + data[23:]),
        PARTIALLY_DECODED,
        refused=True,
    )
    add(
        "gif-bad-code-size.gif",
        gif((13, 11), full, rows, 4, table(16), data=data).replace(b"\x0b\0\0\4", b"\x0b\0\0\x0d"),
        PARTIALLY_DECODED,
        refused=True,
    )
    add("gif-empty-frame.gif", gif((13, 11), (0, 0, 0, 11), rows, 4, table(16)))
    add("gif-no-frame.gif", b"GIF89a\x0d\0\x0b\0\0\0\0;")
    whole = save(image, "GIF")
    for cut in (6, 12, 13, 400, 781, 790, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        add(f"gif-cut-at-{cut}.gif", whole[:cut])
    add("gif-bomb.gif", gif((65535, 65535), full, rows, 4, table(16)))
