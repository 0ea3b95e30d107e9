#!/usr/bin/env python3
"""Makes the clips of chiasm-video with ffmpeg.

    python make_clips.py [NAME...]

Needs ffmpeg 5.1 with libx264, libx265, libvpx, libaom (Debian 12's package has all of them). Writes
small files to crates/chiasm-video/tests/clips: all of them, or those with these names. The clips
are committed, because other versions of the encoders write other bytes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import patches

OUT = Path(__file__).resolve().parents[2] / "crates/chiasm-video/tests/clips"

X264 = ["-c:v", "libx264", "-preset", "medium", "-crf", "42", "-threads", "1"]
X265 = ["-c:v", "libx265", "-preset", "fast", "-crf", "42", "-tag:v", "hvc1"]
VP9 = ["-c:v", "libvpx-vp9", "-deadline", "good", "-cpu-used", "4", "-crf", "50", "-b:v", "50k"]
VP9 += ["-threads", "1"]
AAC = ["-c:a", "aac", "-b:a", "16k"]
TONE = ["-f", "lavfi", "-i", "sine=f=440:d=2:r=16000"]


def x265(params=""):
    quiet = "pools=none:frame-threads=1:log-level=none"
    return [*X265, "-x265-params", f"{quiet}:{params}" if params else quiet]


def source(seconds=2.0, rate="30", size="160x96", pixels="yuv420p"):
    """Returns the input arguments of a moving picture."""
    life = f"life=s=20x12:r={rate}:mold=12:ratio=0.3:seed=7:life_color=#C83232:mold_color=#205020"
    graph = (
        f"{life},scale={size.replace('x', ':')}:flags=neighbor,format=yuv444p[l];"
        f"testsrc2=s={size}:r={rate},format=yuv444p[t];"
        f"[t][l]blend=all_mode=average,trim=duration={seconds},format={pixels}"
    )
    return ["-f", "lavfi", "-i", graph]


def encoded(*codec, **picture):
    """A clip that is encoded directly."""

    def make(path):
        ffmpeg(*source(**picture), *codec, path)

    return make


def copied(name, *arguments, before=(), bitstream=True):
    """A clip that is another clip in another container, or a part of it."""

    def make(path):
        ffmpeg(*before, "-i", clip(name), *(["-c", "copy"] if bitstream else []), *arguments, path)

    return make


def patched(name, patch):
    """A clip whose bytes are those of another clip, patched."""

    def make(path):
        path.write_bytes(patch(clip(name).read_bytes()))

    return make


def with_audio(*codec, **picture):
    def make(path):
        ffmpeg(*source(**picture), *TONE, *codec, *AAC, "-shortest", path)

    return make


def in_band(path):
    """Parameter sets in front of each key frame."""
    stream = path.with_suffix(".ts")
    ffmpeg(*source(), *H264, "-x264-params", "repeat-headers=1", stream)
    ffmpeg("-i", stream, "-c", "copy", path)


FRAGMENTED = ["-movflags", "frag_keyframe+empty_moov+default_base_moof"]
GOP = ["-g", "15", "-bf", "2"]
H264 = [*X264, *GOP]
VFR = "select='not(eq(mod(n,7),3))*not(between(n,20,26))'"

CLIPS = {
    # H.264 in mp4.
    "h264.mp4": encoded(*H264),
    "h264_baseline.mp4": encoded(*X264, "-profile:v", "baseline", "-g", "12"),
    "h264_pyramid.mp4": encoded(
        *X264, "-g", "30", "-bf", "7", "-b_strategy", "0",
        "-x264-params", "b-pyramid=normal:scenecut=0",
    ),
    "h264_open_gop.mp4": encoded(*X264, "-g", "12", "-bf", "3", "-x264-params", "open-gop=1"),
    "h264_intra_refresh.mp4": encoded(*X264, "-g", "20", "-x264-params", "intra-refresh=1"),
    "h264_long_gop.mp4": encoded(*X264, "-g", "250", "-bf", "3", seconds=3),
    "h264_all_intra.mp4": encoded(*X264, "-g", "1", seconds=0.6),
    "h264_slices.mp4": encoded(*H264, "-x264-params", "slices=4"),
    "h264_main_cavlc.mp4": encoded(
        *X264, "-g", "15", "-profile:v", "main", "-coder", "0", "-refs", "4"
    ),
    "h264_vfr.mp4": encoded(*H264, "-vf", VFR, "-vsync", "vfr"),
    "h264_vfr_no_b.mp4": encoded(*X264, "-g", "20", "-bf", "0", "-vf", VFR, "-vsync", "vfr"),
    "h264_vfr_ramp.mp4": encoded(
        *X264, "-g", "10", "-bf", "2", "-vf", "setpts='N*N*1.5/TB/300'", "-vsync", "vfr",
        seconds=1.5,
    ),
    "h264_vfr_slowing.mp4": encoded(
        *X264, "-g", "10", "-bf", "0", "-vf", "select='lt(n,30)+not(mod(n,4))'", "-vsync", "vfr",
        seconds=3,
    ),
    "h264_29_97.mp4": encoded(*H264, rate="30000/1001"),
    "h264_23_976.mp4": encoded(*H264, rate="24000/1001"),
    "h264_60.mp4": encoded(*H264, rate="60", seconds=1),
    "h264_5.mp4": encoded(*X264, "-g", "4", rate="5", seconds=4),
    "h264_sar.mp4": encoded(*H264, "-vf", "setsar=4/3"),
    "h264_full_range_709.mp4": encoded(
        *H264, "-vf", "scale=out_range=full", "-color_range", "pc", "-colorspace", "bt709",
        "-color_primaries", "bt709", "-color_trc", "bt709",
    ),
    "h264_odd_crop.mp4": encoded(*H264, size="150x86"),
    "h264_10_bit.mp4": encoded(*H264, pixels="yuv420p10le"),
    "h264_444.mp4": encoded(*H264, pixels="yuv444p"),
    "h264_422.mp4": encoded(*H264, pixels="yuv422p"),
    "h264_gray.mp4": encoded(*H264, pixels="gray"),
    "h264_interlaced.mp4": encoded(*H264, "-flags", "+ildct+ilme", "-x264-params", "tff=1"),
    "h264_paff_free.mp4": encoded(*H264, "-x264-params", "fake-interlaced=1"),
    "h264_one_frame.mp4": encoded(*H264, "-frames:v", "1"),
    "h264_two_frames.mp4": encoded(*H264, "-frames:v", "2"),
    "h264_faststart.mp4": copied("h264.mp4", "-movflags", "+faststart"),
    "h264_mov.mov": copied("h264.mp4"),
    "h264_audio.mp4": with_audio(*H264),
    "h264_audio_long.mp4": with_audio(*H264, seconds=1.2),
    "h264_timescale.mp4": copied("h264_29_97.mp4", "-video_track_timescale", "600"),
    "h264_negative_ctts.mp4": copied("h264.mp4", "-movflags", "+negative_cts_offsets"),
    "h264_timecode.mov": copied("h264.mp4", "-timecode", "01:00:00:00"),
    "h264_in_band.mp4": in_band,
    "h264_in_band_changes.mp4": patched("h264_in_band.mp4", patches.change_in_band_set),
    "h264_temporal_aud.mp4": copied("h264.mp4", "-bsf:v", "h264_metadata=aud=insert"),
    # Edit lists.
    "h264_edit.mp4": copied("h264.mp4", before=["-ss", "0.72"]),
    "h264_edit_pyramid.mp4": copied("h264_pyramid.mp4", before=["-ss", "0.5"]),
    "h264_edit_open_gop.mp4": copied("h264_open_gop.mp4", before=["-ss", "0.6"]),
    "h264_edit_audio.mp4": copied("h264_audio.mp4", before=["-ss", "0.72"]),
    "h264_edit_no_b.mp4": copied("h264_baseline.mp4", before=["-ss", "1.0"]),
    "h264_edit_vfr.mp4": copied("h264_vfr.mp4", before=["-ss", "0.7"]),
    "h264_edit_end.mp4": patched("h264.mp4", patches.shorten_edit),
    "h264_edit_end_gop.mp4": patched("h264.mp4", patches.shorten_edit_by_a_gop),
    "h264_late_start.mp4": copied("h264.mp4", before=["-itsoffset", "0.5"]),
    "h264_two_edits.mp4": patched("h264.mp4", patches.two_edits),
    "h264_no_edit.mp4": copied("h264.mp4", "-use_editlist", "0"),
    # Fragments.
    "h264_fragments.mp4": copied("h264.mp4", *FRAGMENTED),
    "h264_fragments_no_b.mp4": copied("h264_baseline.mp4", *FRAGMENTED),
    "h264_fragments_vfr.mp4": copied("h264_vfr.mp4", *FRAGMENTED),
    "h264_fragments_sidx.mp4": copied("h264.mp4", "-movflags", "dash+global_sidx+frag_keyframe"),
    "h264_fragments_moov.mp4": copied("h264.mp4", "-movflags", "frag_keyframe"),
    "h264_fragments_audio.mp4": copied("h264_audio.mp4", *FRAGMENTED),
    "h264_fragments_29_97.mp4": copied("h264_29_97.mp4", *FRAGMENTED),
    "h264_fragments_negative.mp4": copied(
        "h264.mp4", "-movflags", "frag_keyframe+empty_moov+default_base_moof+negative_cts_offsets"
    ),
    "h264_fragments_truncated.mp4": patched(
        "h264_fragments.mp4", lambda data: data[: len(data) * 7 // 10]
    ),
    # Rotation.
    "h264_rotated_90.mp4": copied("h264.mp4", "-metadata:s:v", "rotate=90"),
    "h264_rotated_180.mp4": copied("h264.mp4", "-metadata:s:v", "rotate=180"),
    "h264_rotated_270.mov": copied("h264.mp4", "-metadata:s:v", "rotate=270"),
    # Damage and oddities.
    "h264_truncated.mp4": patched("h264_faststart.mp4", lambda data: data[: len(data) * 6 // 10]),
    "h264_no_moov.mp4": patched("h264.mp4", lambda data: data[: len(data) * 6 // 10]),
    "h264_no_restriction.mp4": patched("h264_pyramid.mp4", patches.without_bitstream_restriction),
    "h264_zero_fps.mp4": patched("h264.mp4", patches.zero_durations),
    "hevc_no_ctts.mp4": patched("hevc.mp4", lambda data: data.replace(b"ctts", b"free")),
    "h264_no_ctts.mp4": patched("h264.mp4", lambda data: data.replace(b"ctts", b"free")),
    "h264_no_stss.mp4": patched("h264.mp4", lambda data: data.replace(b"stss", b"free")),
    "h264_last_stts.mp4": patched("h264_vfr_ramp.mp4", patches.long_last_duration),
    # HEVC.
    "hevc.mp4": encoded(*x265("keyint=15:bframes=3")),
    "hevc_hev1.mp4": encoded(*x265("keyint=15:repeat-headers=1"), "-tag:v", "hev1"),
    "hevc_open_gop.mp4": encoded(*x265("keyint=12:open-gop=1:bframes=4")),
    "hevc_closed_gop.mp4": encoded(*x265("keyint=12:open-gop=0:bframes=4")),
    "hevc_temporal_layers.mp4": encoded(*x265("keyint=30:temporal-layers=3:bframes=4")),
    "hevc_10_bit.mp4": encoded(*x265("keyint=20"), pixels="yuv420p10le"),
    "hevc_444.mp4": encoded(*x265("keyint=20"), pixels="yuv444p"),
    "hevc_fragments.mp4": copied("hevc_closed_gop.mp4", *FRAGMENTED, "-tag:v", "hvc1"),
    "hevc_edit.mp4": copied("hevc_closed_gop.mp4", "-tag:v", "hvc1", before=["-ss", "0.7"]),
    "hevc_edit_open_gop.mp4": copied("hevc_open_gop.mp4", "-tag:v", "hvc1", before=["-ss", "0.7"]),
    "hevc.mkv": copied("hevc.mp4"),
    # VP8 and VP9.
    "vp9.webm": encoded(*VP9, "-g", "20"),
    "vp9_alt_ref.webm": encoded(*VP9, "-g", "25", "-auto-alt-ref", "1", "-lag-in-frames", "12"),
    "vp9_odd.webm": encoded(*VP9, "-g", "20", size="161x97"),
    "vp9_444.webm": encoded(*VP9, "-g", "20", pixels="yuv444p"),
    "vp9.mp4": copied("vp9.webm"),
    "vp9_alt_ref.mp4": copied("vp9_alt_ref.webm"),
    "vp9_29_97.webm": encoded(*VP9, "-g", "20", rate="30000/1001"),
    "vp9_audio.webm": lambda path: ffmpeg(
        *source(), *TONE, *VP9, "-g", "20", "-c:a", "libopus", "-b:a", "12k", "-shortest", path
    ),
    "vp8.webm": encoded("-c:v", "libvpx", "-g", "20", "-b:v", "50k", "-threads", "1"),
    # H.264 in Matroska.
    "h264.mkv": copied("h264.mp4"),
    "h264_pyramid.mkv": copied("h264_pyramid.mp4"),
    "h264_vfr.mkv": copied("h264_vfr.mp4"),
    "h264_open_gop.mkv": copied("h264_open_gop.mp4"),
    "h264_29_97.mkv": copied("h264_29_97.mp4"),
    "h264_audio.mkv": copied("h264_audio.mp4"),
    "h264_full_range_709.mkv": copied("h264_full_range_709.mp4"),
    "h264_live.mkv": copied("h264.mp4", "-f", "matroska", "-live", "1"),
    "h264_cues_first.mkv": copied("h264.mp4", "-reserve_index_space", "2k"),
    "h264_late_start.mkv": copied("h264.mp4", before=["-itsoffset", "0.5"]),
    "h264_no_restriction.mkv": copied("h264_no_restriction.mp4"),
    "h264_truncated.mkv": patched("h264.mkv", lambda data: data[: len(data) * 6 // 10]),
    "h264_rotated_90.mkv": copied("h264_rotated_90.mp4"),
    # Other codecs and containers.
    "mpeg4.mp4": encoded("-c:v", "mpeg4", "-g", "12", "-bf", "2", "-q:v", "24", seconds=1),
    "mpeg4.avi": encoded("-c:v", "mpeg4", "-g", "12", "-q:v", "24", seconds=1),
    "mjpeg.mov": encoded("-c:v", "mjpeg", "-q:v", "24", seconds=0.5, pixels="yuvj420p"),
    "av1.mp4": encoded("-c:v", "libaom-av1", "-cpu-used", "8", "-crf", "50", seconds=0.5),
    "h264.ts": copied("h264.mp4"),
    "two_frames.gif": encoded("-frames:v", "2", pixels="rgb24"),
    "audio_only.mp4": lambda path: ffmpeg(*TONE, *AAC, path),
}


def ffmpeg(*arguments):
    """Runs ffmpeg so that its output depends on nothing but its arguments."""
    *arguments, path = map(str, arguments)
    quiet = ["-nostdin", "-v", "error", "-y", "-filter_complex_threads", "1"]
    exact = ["-map_metadata", "-1", "-fflags", "+bitexact", "-flags:v", "+bitexact"]
    keeps_rotation = ["-map_metadata:s:v", "0:s:v"] if "rotate" in path else []
    subprocess.run(["ffmpeg", *quiet, *arguments, *exact, *keeps_rotation, path], check=True)


def clip(name):
    """Returns the path of a clip, made first if it is missing."""
    path = OUT / name
    if not path.exists():
        make(name)
    return path


def make(name):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        CLIPS[name](path)
        (OUT / name).write_bytes(path.read_bytes())


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    names = sys.argv[1:] or list(CLIPS)
    for name in names:
        (OUT / name).unlink(missing_ok=True)
    for name in names:
        clip(name)
        print(f"{name}: {(OUT / name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
