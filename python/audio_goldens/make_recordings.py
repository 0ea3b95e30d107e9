#!/usr/bin/env python3
"""Makes the compressed recordings of chiasm-audio.

    python make_recordings.py

Needs soundfile (with LAME and libFLAC) and PyAV of the vLLM environment. Writes small files to
crates/chiasm-audio/tests/recordings. They are committed, because other versions of the encoders
write other bytes.
"""

import io
import struct
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile

OUT = Path(__file__).resolve().parents[2] / "crates/chiasm-audio/tests/recordings"

FRAME_SAMPLES = {"libmp3lame": 1152, "aac": 1024}
# The bytes of an ID3v1 tag, and of the header of an ID3v2 tag.
ID3V1 = b"TAG" + bytes(125)
ID3V2 = b"ID3\4\0\0"


def tone(samples: int, rate: int, channels: int = 1) -> np.ndarray:
    """Returns a tone of changing pitch, with rows of one sample per channel."""
    seconds = np.arange(samples) / rate
    wave = 0.3 * np.sin(2 * np.pi * (220 + 40 * seconds) * seconds)
    return np.repeat(wave[:, None], channels, axis=1)


def by_sndfile(wave: np.ndarray, rate: int, kind: str, subtype: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format=kind, subtype=subtype, **settings)
    return file.getvalue()


def by_ffmpeg(
    wave: np.ndarray,
    rate: int,
    codec: str,
    container: str,
    bit_rate: int = 24_000,
    delay: int = 0,
    **options: str,
) -> bytes:
    """Encodes with FFmpeg. ``delay`` is the number of samples that an edit list hides."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.bit_rate = bit_rate
        stream.layout = "mono" if wave.shape[1] == 1 else "stereo"
        planes = np.ascontiguousarray(wave.T, dtype=np.float32)
        step = FRAME_SAMPLES[codec]
        for start in range(0, wave.shape[0], step):
            part = np.ascontiguousarray(planes[:, start : start + step])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=stream.layout.name)
            frame.sample_rate = rate
            frame.pts = start
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return with_delay(file.getvalue(), delay) if delay else file.getvalue()


def with_delay(mp4: bytes, delay: int) -> bytes:
    """Returns an mp4 whose only edit begins later."""
    media_time = mp4.index(b"elst") + 16
    return mp4[:media_time] + struct.pack(">i", delay) + mp4[media_time + 4 :]


def id3v2(size: int) -> bytes:
    return ID3V2 + bytes(size >> shift & 127 for shift in (21, 14, 7, 0)) + bytes(size)


def frame_bytes(header: bytes) -> int:
    """Returns the size of an MP3 frame of MPEG-2 or MPEG-1."""
    (bits,) = struct.unpack(">I", header)
    is_mpeg1 = bits >> 19 & 3 == 3
    if is_mpeg1:
        bit_rate = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
    else:
        bit_rate = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
    rate = (44_100, 48_000, 32_000)[bits >> 10 & 3] // {3: 1, 2: 2, 0: 4}[bits >> 19 & 3]
    factor = 144_000 if is_mpeg1 else 72_000
    return factor * bit_rate[(bits >> 12 & 15) - 1] // rate + (bits >> 9 & 1)


def without_frames(mp3: bytes, count: int) -> bytes:
    for _ in range(count):
        mp3 = mp3[frame_bytes(mp3[:4]) :]
    return mp3


def without_length(flac: bytes) -> bytes:
    """Returns a FLAC file whose header does not tell the number of samples."""
    packed = 8 + 13
    return flac[:packed] + bytes([flac[packed] & 0xF0]) + bytes(4) + flac[packed + 5 :]


def without_extension_mark(mp4: bytes) -> bytes:
    """Returns an mp4 whose decoder configuration does not deny an extension."""
    return mp4.replace(b"\x56\xe5\x00", b"\0\0\0", 1)


def flac_files() -> dict[str, bytes]:
    def flac(samples: int, rate: int, channels: int = 1, subtype: str = "PCM_16") -> bytes:
        return by_sndfile(tone(samples, rate, channels), rate, "FLAC", subtype)

    speech = flac(16_000, 16_000)
    silence = by_sndfile(np.zeros((720_000, 1)), 16_000, "FLAC", "PCM_16")
    return {
        "tone_16k.flac": speech,
        "tone_16k_without_length.flac": without_length(speech),
        "tone_16k_cut.flac": speech[: len(speech) // 2],
        "silence_45_seconds.flac": silence,
        "tone_8k_8_bit.flac": flac(12_345, 8_000, subtype="PCM_S8"),
        "tone_22k_odd.flac": flac(1_001, 22_050),
        "tone_44k_stereo.flac": flac(22_051, 44_100, 2),
        "tone_48k_24_bit.flac": flac(4_096 * 3, 48_000, subtype="PCM_24"),
        "short_16k.flac": flac(320, 16_000),
    }


def mp3_files() -> dict[str, bytes]:
    def by_lame(samples: int, rate: int, channels: int, mode: str) -> bytes:
        wave = tone(samples, rate, channels)
        return by_sndfile(
            wave, rate, "MP3", "MPEG_LAYER_III", bitrate_mode=mode, compression_level=0.9
        )

    vbr = by_lame(30_000, 22_050, 1, "VARIABLE")
    cbr = by_lame(12_345, 16_000, 1, "CONSTANT")
    untagged = by_ffmpeg(
        tone(20_000, 16_000), 16_000, "libmp3lame", "mp3", write_xing="0", id3v2_version="0"
    )
    return {
        "tone_lame_vbr.mp3": vbr,
        "tone_lame_cbr.mp3": cbr,
        "tone_lame_average.mp3": by_lame(9_999, 24_000, 1, "AVERAGE"),
        "tone_lame_44k_stereo.mp3": by_lame(30_001, 44_100, 2, "VARIABLE"),
        "tone_lame_48k.mp3": by_lame(24_001, 48_000, 1, "CONSTANT"),
        "tone_lame_8k.mp3": by_lame(8_001, 8_000, 1, "CONSTANT"),
        "tone_lame_short.mp3": by_lame(400, 16_000, 1, "CONSTANT"),
        "tone_lavf_cbr.mp3": by_ffmpeg(tone(15_001, 32_000), 32_000, "libmp3lame", "mp3"),
        "tone_vbr_without_tag.mp3": without_frames(vbr, 1),
        "tone_vbr_from_the_middle.mp3": without_frames(vbr, 9),
        "tone_cbr_without_tag.mp3": untagged,
        "tone_cbr_cut.mp3": cbr[:-100],
        "tone_id3.mp3": id3v2(2_000) + vbr + ID3V1,
        "silence_45_seconds.mp3": by_ffmpeg(
            np.zeros((360_000, 1)), 8_000, "libmp3lame", "mp3", 8_000
        ),
    }


def aac_files() -> dict[str, bytes]:
    def aac(samples: int, rate: int, channels: int = 1, **settings: Any) -> bytes:
        container = settings.pop("container", "mp4")
        return by_ffmpeg(tone(samples, rate, channels), rate, "aac", container, **settings)

    return {
        "tone_edit.m4a": aac(12_345, 22_050, delay=1_024),
        "tone_without_edit.m4a": aac(8_000, 16_000, use_editlist="0"),
        "tone_late_edit.m4a": aac(20_000, 16_000, delay=5_000),
        "tone_44k_stereo.m4a": aac(22_051, 44_100, 2, delay=1_024, container="ipod"),
        "tone_48k.m4a": aac(24_001, 48_000, delay=1_024),
        "tone_24k_hidden_extension.m4a": without_extension_mark(aac(9_000, 24_000)),
        "tone_fragments.m4a": aac(8_000, 16_000, movflags="frag_keyframe+empty_moov"),
        "tone_quicktime.mov": aac(8_000, 16_000, container="mov"),
        "tone_cut.m4a": aac(8_000, 16_000)[:1_500],
        "silence_45_seconds.m4a": by_ffmpeg(
            np.zeros((720_000, 1)), 16_000, "aac", "mp4", 8_000, delay=1_024
        ),
    }


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for name, content in {**flac_files(), **mp3_files(), **aac_files()}.items():
        (OUT / name).write_bytes(content)
        print(f"{name}: {len(content)} bytes")


if __name__ == "__main__":
    main()
