"""Changes to the bytes of clips that no muxer makes."""

import struct


def field(data, name, offset):
    """Returns the position of a field of the only box with this name, from the end of its name."""
    assert data.count(name) == 1, name
    return data.index(name) + 4 + offset


def set_u32(data, position, *values):
    data = bytearray(data)
    struct.pack_into(f">{len(values)}I", data, position, *values)
    return bytes(data)


def get_u32(data, position):
    return struct.unpack_from(">I", data, position)[0]


def shorten_edit(data, milliseconds=300):
    """Hides the end of a clip whose movie time scale is 1000."""
    position = field(data, b"elst", 8)
    return set_u32(data, position, get_u32(data, position) - milliseconds)


def shorten_edit_by_a_gop(data):
    return shorten_edit(data, 1100)


def two_edits(data):
    """Plays a clip from its start, then from half a second: `elst` grows into the next box."""
    position = field(data, b"edts", 4)
    size = get_u32(data, position - 4) - 4 + 12
    media_time = get_u32(data, field(data, b"elst", 12))
    edits = struct.pack(">IIIIiHHIiHH", 0, 2, 1000, media_time, 0, 0, 0, 0, 0, 0, 0)[:8]
    edits += struct.pack(">IiHH", 1000, media_time, 1, 0) * 2
    old = field(data, b"elst", -8)
    box = struct.pack(">I4s", 8 + len(edits), b"elst") + edits
    assert size
    grown = data[:old] + box + data[old + get_u32(data, old) :]
    for name in (b"edts", b"trak", b"moov"):
        at = field(grown, name, -8)
        grown = set_u32(grown, at, get_u32(grown, at) + 12)
    return grown


def zero_durations(data):
    """Sets all durations of `stts`, `mdhd`, `tkhd` and `mvhd` to zero."""
    position = field(data, b"stts", 4)
    for entry in range(get_u32(data, position)):
        data = set_u32(data, position + 8 + 8 * entry, 0)
    data = set_u32(data, field(data, b"mdhd", 16), 0)
    data = set_u32(data, field(data, b"tkhd", 20), 0)
    data = set_u32(data, field(data, b"mvhd", 16), 0)
    return data.replace(b"edts", b"free")


def long_last_duration(data):
    """Sets the duration of the last sample to ten seconds, as some writers of screen casts do."""
    position = field(data, b"stts", 4)
    count = get_u32(data, position)
    last = position + 4 + 8 * (count - 1)
    assert get_u32(data, last) == 1
    return set_u32(data, last + 4, 10 * get_u32(data, field(data, b"mdhd", 12)))


def without_bitstream_restriction(data):
    """Removes `bitstream_restriction` from the SPS of x264. Many hardware encoders lack it."""
    position = field(data, b"avcC", 6)
    length = struct.unpack_from(">H", data, position)[0]
    sps = data[position + 2 : position + 2 + length]
    bits = "".join(f"{byte:08b}" for byte in unescape(sps))
    end = restriction_flag(bits)
    assert bits[end] == "1"
    bits = bits[:end] + "01"
    bits += "0" * (-len(bits) % 8)
    short = escape(bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)))
    assert len(short) <= length
    # Bytes of zero after the stop bit are trailing_zero_8bits, which decoders skip.
    return data.replace(sps, short + bytes(length - len(short)))


def unescape(nal):
    return nal.replace(b"\0\0\3", b"\0\0")


def escape(nal):
    out = bytearray()
    for byte in nal:
        if byte <= 3 and out[-2:] == b"\0\0":
            out.append(3)
        out.append(byte)
    return bytes(out)


def restriction_flag(bits):
    """Returns the position of `bitstream_restriction_flag` in an SPS of High profile from x264."""
    at = 0

    def u(count):
        nonlocal at
        at += count
        return int(bits[at - count : at], 2)

    def ue():
        nonlocal at
        zeros = 0
        while bits[at] == "0":
            zeros += 1
            at += 1
        return u(zeros + 1) - 1

    u(8)
    profile = u(8)
    u(16)
    ue()
    assert profile == 100
    ue(), ue(), ue(), u(1)
    assert u(1) == 0, "scaling matrices"
    ue()
    assert ue() == 0
    ue()
    ue(), u(1), ue(), ue()
    assert u(1) == 1, "interlaced"
    u(1)
    if u(1):
        ue(), ue(), ue(), ue()
    assert u(1) == 1, "no VUI"
    if u(1) and u(8) == 255:
        u(32)
    if u(1):
        u(1)
    if u(1):
        u(4)
        if u(1):
            u(24)
    if u(1):
        ue(), ue()
    if u(1):
        u(65)
    assert u(1) == 0 and u(1) == 0, "HRD"
    u(1)
    return at


def change_in_band_set(data):
    """Changes a bit of the last picture parameter set in front of a key frame."""
    header = b"\0\0\0\x06\x68\xeb"
    assert data.count(header) > 1
    at = data.rindex(header) + len(header) + 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
