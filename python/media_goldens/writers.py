"""Writers of files that Pillow cannot save: rare PNG, GIF and BMP variants, and broken files."""

import struct
import zlib

ADAM7 = [
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
]
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def chunk(kind, content, crc=None):
    crc = zlib.crc32(kind + content) if crc is None else crc
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def pack_samples(samples, depth):
    """Packs one row of samples into bytes."""
    if depth == 16:
        return b"".join(struct.pack(">H", value) for value in samples)
    out = bytearray()
    buffer = 0
    count = 0
    for value in samples:
        buffer = buffer << depth | value
        count += depth
        if count == 8:
            out.append(buffer)
            buffer = count = 0
    if count:
        out.append(buffer << (8 - count))
    return bytes(out)


def paeth(a, b, c):
    p = a + b - c
    return min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]


def filter_row(kind, row, above, step):
    out = bytearray()
    for i, value in enumerate(row):
        a = row[i - step] if i >= step else 0
        b = above[i]
        c = above[i - step] if i >= step else 0
        predicted = [0, a, b, (a + b) // 2, paeth(a, b, c)][kind]
        out.append((value - predicted) & 255)
    return bytes([kind]) + bytes(out)


def png_rows(pixel, width, height, depth, colour, interlaced=False, filters=range(5)):
    """Returns the filtered rows; the rows cycle through `filters`.

    `pixel(x, y)` returns the samples of a pixel.
    """
    bits = depth * CHANNELS[colour]
    step = max(1, bits // 8)
    passes = ADAM7 if interlaced else [(0, 0, 1, 1)]
    out = []
    turn = 0
    for x0, y0, dx, dy in passes:
        columns = range(x0, width, dx)
        if not columns:
            continue
        above = bytes((len(columns) * bits + 7) // 8)
        for y in range(y0, height, dy):
            row = pack_samples([value for x in columns for value in pixel(x, y)], depth)
            out.append(filter_row(list(filters)[turn % len(filters)], row, above, step))
            above = row
            turn += 1
    return b"".join(out)


def png(
    width,
    height,
    depth,
    colour,
    pixel,
    before=(),
    after=(),
    interlaced=False,
    data=None,
    idat=None,
    end=True,
    **kwargs,
):
    """Returns a PNG file.

    `before` and `after` are chunks around the image data. `idat` is the image data per chunk, in
    bytes.
    """
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, int(interlaced))
    if data is None:
        data = zlib.compress(png_rows(pixel, width, height, depth, colour, interlaced, **kwargs), 9)
    parts = [data] if idat is None else [data[i : i + idat] for i in range(0, len(data), idat)]
    chunks = [chunk(b"IHDR", header), *before, *(chunk(b"IDAT", part) for part in parts), *after]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + (chunk(b"IEND", b"") if end else b"")


def lzw(indices, bits):
    """Encodes GIF's LZW without a growing table: clears before the code size would change."""
    clear = 1 << bits
    size = bits + 1
    buffer = 0
    count = 0
    out = bytearray()

    def emit(code):
        nonlocal buffer, count
        buffer |= code << count
        count += size
        while count >= 8:
            out.append(buffer & 255)
            buffer >>= 8
            count -= 8

    for number, index in enumerate(indices):
        if number % max(1, clear - 2) == 0:
            emit(clear)
        emit(index)
    emit(clear + 1)
    if count:
        out.append(buffer & 255)
    return bytes(out)


def sub_blocks(data, size=255):
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(bytes([len(part)]) + part for part in parts) + b"\0"


def table_flags(table):
    if table is None:
        return 0
    return 0x80 | (len(table) // 3).bit_length() - 2


def gif(
    screen,
    frame,
    indices,
    bits,
    global_table=None,
    local_table=None,
    transparent=None,
    interlaced=False,
    data=None,
    before=b"",
    disposal=0,
    block=255,
    end=b";",
):
    """Returns a GIF file with one frame.

    `frame` is x, y, width, height; `indices` are rows of palette indices.
    """
    x, y, width, height = frame
    out = (
        b"GIF89a"
        + struct.pack("<HHBBB", *screen, table_flags(global_table), 0, 0)
        + (global_table or b"")
    )
    out += before
    if transparent is not None or disposal:
        flags = disposal << 2 | (transparent is not None)
        out += b"!\xf9\x04" + struct.pack("<BHB", flags, 0, transparent or 0) + b"\0"
    out += (
        b","
        + struct.pack("<HHHHB", x, y, width, height, table_flags(local_table) | interlaced << 6)
        + (local_table or b"")
    )
    if interlaced:
        order = [
            *range(0, height, 8),
            *range(4, height, 8),
            *range(2, height, 4),
            *range(1, height, 2),
        ]
        indices = [indices[row] for row in order]
    if data is None:
        data = lzw([index for row in indices for index in row], bits)
    return out + bytes([bits]) + sub_blocks(data, block) + end


def bmp(
    width,
    height,
    bits,
    rows,
    palette=b"",
    header=40,
    compression=0,
    colours=0,
    masks=(),
    top_down=False,
    entry=4,
    stride=None,
):
    """Returns a BMP file.

    `rows` are packed rows from top to bottom, or run-length encoded data as one bytes object.
    """
    if isinstance(rows, bytes):
        data = rows
    else:
        stride = (width * bits + 31) // 32 * 4 if stride is None else stride
        rows = rows if top_down else rows[::-1]
        data = b"".join(row.ljust(stride, b"\0") for row in rows)
    if header == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        signed = -height if top_down else height
        sizes = (header, width, signed, 1, bits, compression, len(data))
        info = struct.pack("<IiiHHIIiiII", *sizes, 2835, 2835, colours, 0)
        inside = b"".join(struct.pack("<I", mask) for mask in masks)
        info = (info + inside).ljust(header, b"\0") if header > 40 else info + inside
    offset = 14 + len(info) + len(palette)
    return b"BM" + struct.pack("<IHHI", offset + len(data), 0, 0, offset) + info + palette + data


def exif(orientation, little=True, kind=3, count=1, more=()):
    """Returns a TIFF structure: the entries `more` and the orientation tag.

    An entry is (tag, type, count, value bytes).
    """
    order = "<" if little else ">"
    value = struct.pack(order + {1: "B", 3: "H", 4: "I"}[kind], orientation).ljust(4, b"\0")
    entries = [*more, (274, kind, count, value)]
    out = (b"II*\0" if little else b"MM\0*") + struct.pack(order + "IH", 8, len(entries))
    for tag, tag_kind, tag_count, tag_value in entries:
        out += struct.pack(order + "HHI", tag, tag_kind, tag_count) + tag_value
    return out + bytes(4)


def xmp(orientation, as_element=False):
    inner = f"<tiff:Orientation>{orientation}</tiff:Orientation>" if as_element else ""
    attribute = "" if as_element else f' tiff:Orientation="{orientation}"'
    return (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        f'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/"{attribute}>'
        f"{inner}</rdf:Description></rdf:RDF></x:xmpmeta>"
    ).encode()


def jpeg_segment(marker, content):
    return struct.pack(">BBH", 255, marker, len(content) + 2) + content


def with_segments(jpeg, *segments):
    """Inserts segments right after the start of a JPEG file."""
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def riff_chunk(kind, content):
    return kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def riff_chunks(webp):
    """Returns the chunks of a WebP file as (kind, content)."""
    chunks = []
    at = 12
    while at + 8 <= len(webp):
        kind = webp[at : at + 4]
        length = struct.unpack("<I", webp[at + 4 : at + 8])[0]
        chunks.append((kind, webp[at + 8 : at + 8 + length]))
        at += 8 + length + length % 2
    return chunks


def webp(chunks, size=None):
    body = b"WEBP" + b"".join(riff_chunk(kind, content) for kind, content in chunks)
    return b"RIFF" + struct.pack("<I", len(body) if size is None else size) + body


def vp8x(flags, width, height):
    return (
        struct.pack("<I", flags)
        + struct.pack("<I", width - 1)[:3]
        + struct.pack("<I", height - 1)[:3]
    )


def anmf(x, y, width, height, chunks, flags=0):
    offsets = struct.pack("<I", x // 2)[:3] + struct.pack("<I", y // 2)[:3]
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    return (
        offsets
        + size
        + b"\x64\0\0"
        + bytes([flags])
        + b"".join(riff_chunk(*chunk) for chunk in chunks)
    )
