"""The media and the requests of the benchmark. A picture and two clips are made from formulas and
seeds. Further files differ from them only in a number, and each request has a new question.

The picture is one of `bench/peers/make_pictures.py`, which looks like a photograph to a codec. A
clip is a camera that moves over such a picture: H.264 by libx264, the encoder of PyAV's wheel, on
one thread, so the file is the same each time.
"""

import base64
import io
import struct
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "peers"))
from make_pictures import picture  # noqa: E402

# The processor uses two frames per second.
FRAMES_PER_SECOND = 4
WIDTH, HEIGHT = 1280, 720
# The camera's movement between two frames, in pixels.
STEP = 4
JPEG_START = b"\xff\xd8"
JPEG_COMMENT = b"\xff\xfe"

# The modality and the seconds of a clip, by the kind of item.
KINDS = {"image": ("image", 0), "video": ("video", 16), "clip": ("video", 5)}
MIME = {"image": "image/jpeg", "video": "video/mp4"}

MODEL = "processor"
# A few steps: the time before the first token is measured.
ANSWER_TOKENS = 4


def make(folder: Path) -> None:
    """Writes a file for each kind."""
    still = io.BytesIO()
    picture(1920, 1080).save(still, "JPEG", quality=90, subsampling="4:2:0")
    (folder / "image").write_bytes(still.getvalue())
    scene = np.asarray(picture(WIDTH + STEP * 64, HEIGHT))
    for kind, (modality, seconds) in KINDS.items():
        if modality == "video":
            (folder / kind).write_bytes(clip(scene, seconds))


def clip(scene: np.ndarray, seconds: int) -> bytes:
    file = io.BytesIO()
    options = {"preset": "medium", "crf": "23", "threads": "1"}
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base = Fraction(1, FRAMES_PER_SECOND)
        for frame in frames(scene, seconds * FRAMES_PER_SECOND):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def frames(scene: np.ndarray, count: int) -> Iterator[av.VideoFrame]:
    for number in range(count):
        left = STEP * number
        pixels = np.ascontiguousarray(scene[:, left : left + WIDTH])
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame.pts = number
        yield frame


def numbered(file: bytes, number: int) -> bytes:
    """Returns another file with the same contents: a JPEG with a comment, or an MP4 with a free
    box, that contains the number."""
    if file.startswith(JPEG_START):
        comment = JPEG_COMMENT + struct.pack(">HQ", 10, number)
        return file[:2] + comment + file[2:]
    return file + struct.pack(">I4sQ", 16, b"free", number)


class Requests:
    """Makes requests about the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._files = {kind: (folder / kind).read_bytes() for kind in KINDS}

    def file(self, kind: str, item: int) -> bytes:
        return numbered(self._files[kind], item)

    def chat(self, kind: str, item: int, question: int) -> dict[str, Any]:
        modality, _ = KINDS[kind]
        file = base64.b64encode(self.file(kind, item)).decode()
        part = f"{modality}_url"
        # The number always has eight digits, so all questions have the same number of tokens.
        text = f"Question {question:08}: what is to be seen here?"
        content = [
            {"type": part, part: {"url": f"data:{MIME[modality]};base64,{file}"}},
            {"type": "text", "text": text},
        ]
        messages = [{"role": "user", "content": content}]
        return {"model": MODEL, "max_tokens": ANSWER_TOKENS, "messages": messages}
