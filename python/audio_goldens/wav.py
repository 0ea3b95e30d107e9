"""WAVE files of silence by their properties, as `crates/chiasm-audio/tests/wav.rs` builds them."""

import struct
from typing import Any

PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
GUID_REST = b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"


def recipe(
    samples: int,
    rate: int = 16_000,
    channels: int = 1,
    bits: int = 16,
    encoding: int = PCM,
    **more: Any,
) -> dict[str, Any]:
    """Returns the properties of a file.

    ``extensible`` is for a layout with a GUID; ``before`` and ``after`` are lists of the name and
    size of other chunks; ``data_size`` is the stated size of the samples; ``cut`` is a number of
    bytes that are missing at the end.
    """
    return {
        "samples": samples,
        "rate": rate,
        "channels": channels,
        "bits": bits,
        "encoding": encoding,
        **more,
    }


def build(recipe: dict[str, Any]) -> bytes:
    block = recipe["channels"] * recipe["bits"] // 8
    extensible = recipe.get("extensible", False)
    layout = struct.pack(
        "<HHIIHH",
        EXTENSIBLE if extensible else recipe["encoding"],
        recipe["channels"],
        recipe["rate"],
        recipe["rate"] * block,
        block,
        recipe["bits"],
    )
    if extensible:
        layout += struct.pack("<HHIH", 22, recipe["bits"], 0, recipe["encoding"]) + GUID_REST
    data = bytes(recipe["samples"] * block)
    data_size = recipe.get("data_size", len(data))
    parts = [_chunk(b"fmt ", layout)]
    parts += [_chunk(name.encode(), bytes(size)) for name, size in recipe.get("before", [])]
    parts += [_chunk(b"data", data, data_size)]
    parts += [_chunk(name.encode(), bytes(size)) for name, size in recipe.get("after", [])]
    content = b"WAVE" + b"".join(parts)
    file = b"RIFF" + struct.pack("<I", len(content)) + content
    return file[: len(file) - recipe.get("cut", 0)]


def _chunk(name: bytes, body: bytes, size: int | None = None) -> bytes:
    size = len(body) if size is None else size
    return name + struct.pack("<I", size) + body + bytes(len(body) % 2)


# Lengths of 0.02 to 45 seconds, odd ones, and files as programs in the wild write them.
RECIPES = {
    "wav_16k_320": recipe(320),
    "wav_16k_321": recipe(321),
    "wav_16k_641": recipe(641),
    "wav_16k_one_second": recipe(16_000),
    "wav_16k_one_second_and_a_sample": recipe(16_001),
    "wav_16k_30_seconds": recipe(480_000),
    "wav_16k_30_seconds_and_a_sample": recipe(480_001),
    "wav_16k_45_seconds": recipe(720_000),
    "wav_8k_u8": recipe(12_345, 8_000, bits=8),
    "wav_8k_u8_45_seconds": recipe(360_000, 8_000, bits=8),
    "wav_8k_mu_law": recipe(4_321, 8_000, bits=8, encoding=MU_LAW),
    "wav_8k_a_law": recipe(4_322, 8_000, bits=8, encoding=A_LAW),
    "wav_22k_24_bit_stereo": recipe(7_777, 22_050, 2, 24),
    "wav_22k_45_seconds": recipe(992_250, 22_050, bits=8),
    "wav_44k_stereo": recipe(44_101, 44_100, 2),
    "wav_44k_32_bit": recipe(10_007, 44_100, bits=32),
    "wav_44k_31_seconds": recipe(1_367_103, 44_100, bits=8),
    "wav_48k_float": recipe(48_001, 48_000, bits=32, encoding=FLOAT),
    "wav_48k_float_stereo_extensible": recipe(
        9_001, 48_000, 2, 32, FLOAT, extensible=True, before=[("fact", 4)]
    ),
    "wav_48k_double": recipe(3_001, 48_000, bits=64, encoding=FLOAT),
    "wav_11k_six_channels_extensible": recipe(6_001, 11_025, 6, extensible=True),
    "wav_96k": recipe(9_601, 96_000),
    "wav_list_before_samples": recipe(5_000, before=[("LIST", 26)]),
    "wav_list_after_odd_samples": recipe(5_001, bits=8, after=[("LIST", 26)]),
    "wav_odd_junk": recipe(5_002, before=[("JUNK", 27)], after=[("id3 ", 101)]),
    "wav_broadcast": recipe(5_003, before=[("bext", 602)], after=[("iXML", 5)]),
    "wav_unknown_size": recipe(5_004, data_size=0xFFFF_FFFF),
    "wav_size_of_zero": recipe(5_005, data_size=0),
    "wav_size_too_large": recipe(5_006, data_size=20_000),
    "wav_size_too_small": recipe(5_007, data_size=8_000),
    "wav_cut": recipe(5_008, cut=1_000),
    "wav_cut_inside_a_sample": recipe(5_009, channels=2, cut=1),
    "wav_unknown_chunk": recipe(5_010, after=[("abcd", 4)]),
    "wav_empty": recipe(0),
}
