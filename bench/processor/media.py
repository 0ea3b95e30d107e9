"""What is asked for: a picture and two clips, made from formulas and seeds, and files that differ from them in a number only.

The picture is one of `bench/peers/make_pictures.py`, which looks to a codec and a filter as a photograph does. A clip is a camera
that moves over such a picture: H.264 by libx264, the encoder of PyAV's wheel, on one thread, so that the file is the same each time.
"""

import io
import struct
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "peers"))
from make_pictures import picture  # noqa: E402

# Of which the processor takes two per second.
FRAMES_PER_SECOND = 4
WIDTH, HEIGHT = 1280, 720
# Pixels that the camera moves between two frames.
STEP = 4
JPEG_START = b"\xff\xd8"
JPEG_COMMENT = b"\xff\xfe"

# By the names under which they are asked for: the modality, and the seconds of a clip.
KINDS = {"image": ("image", 0), "video": ("video", 16), "clip": ("video", 5)}


def make(folder: Path) -> None:
    """Writes a file for each kind, by its name."""
    still = io.BytesIO()
    picture(1920, 1080).save(still, "JPEG", quality=90, subsampling="4:2:0")
    (folder / "image").write_bytes(still.getvalue())
    scene = np.asarray(picture(WIDTH + STEP * 64, HEIGHT))
    for kind, (modality, seconds) in KINDS.items():
        if modality == "video":
            (folder / kind).write_bytes(clip(scene, seconds))


def clip(scene: np.ndarray, seconds: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND, options={"preset": "medium", "crf": "23", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base = Fraction(1, FRAMES_PER_SECOND)
        for frame in frames(scene, seconds * FRAMES_PER_SECOND):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def frames(scene: np.ndarray, count: int) -> Iterator[av.VideoFrame]:
    for number in range(count):
        left = STEP * number
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(scene[:, left : left + WIDTH]), format="rgb24")
        frame.pts = number
        yield frame


def numbered(file: bytes, number: int) -> bytes:
    """Another file of the same contents: a JPEG with a comment, an MP4 with a free box, that hold the number."""
    if file.startswith(JPEG_START):
        comment = JPEG_COMMENT + struct.pack(">HQ", 10, number)
        return file[:2] + comment + file[2:]
    return file + struct.pack(">I4sQ", 16, b"free", number)
