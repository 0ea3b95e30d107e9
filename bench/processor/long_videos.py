"""The videos of `videos.py`, and the cases in which they are measured.

Each is a camera that moves over a picture, with noise: about 3 Mbit/s of H.264 at 1280 × 720 pixels,
by libx264 of PyAV's wheel on one thread, so the file is the same each time. New files differ in a
free box with a number.
"""

import io
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np

from media import STEP, numbered, picture

FRAMES_PER_SECOND = 30
# The number of different noise patterns, and their standard deviation of 256 values.
PATTERNS, DEVIATION = 16, 8.0
# The number of steps after which the camera turns back.
STEPS_BEFORE_TURN = 64
SEED = 20_261_127


class Clip(NamedTuple):
    """A clip to encode. `copies` of it are one after the other in the file."""

    seconds: int
    width: int
    height: int
    gop: int
    copies: int = 1
    # The step of the camera and of the noise in the first frame.
    first_step: int = 0


class Case(NamedTuple):
    """A clip, and the number of frames that vLLM's loader takes of it."""

    clip: str
    frames: int


CLIPS = {
    "minute": Clip(60, 1280, 720, 250),
    "minute-gop-60": Clip(60, 1280, 720, 60),
    "ten-minutes": Clip(60, 1280, 720, 250, copies=10),
    "four-seconds": Clip(4, 640, 360, 250),
    "five-seconds": Clip(5, 1280, 720, 250),
}
CASES = {
    "10 min": Case("ten-minutes", 32),
    "60 s": Case("minute", 32),
    "60 s, GOP of 60": Case("minute-gop-60", 32),
    "60 s, 8 frames": Case("minute", 8),
    "4 s of 360p": Case("four-seconds", 32),
}
# Many of them at once, as in vLLM's pull request 32104.
CAPTIONED = Case("five-seconds", 10)


def loader_settings(frames: int) -> dict[str, Any]:
    """Returns the request's `media_io_kwargs` for this number of evenly spaced frames. Qwen's own
    loader would take two per second."""
    return {"video": {"video_backend": "opencv", "num_frames": frames}}


class Videos:
    """The files of a run. A numbered copy exists only while it is measured."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        encoded: dict[Clip, bytes] = {}
        for name, clip in CLIPS.items():
            once = clip._replace(copies=1)
            if once not in encoded:
                encoded[once] = encode(once)
            file = encoded[once]
            if clip.copies > 1:
                file = concatenate([(file, clip.seconds)] * clip.copies)
            self.path(name).write_bytes(file)

    def path(self, clip: str, number: int = 0) -> Path:
        return self._folder / (f"{clip}-{number}.mp4" if number else f"{clip}.mp4")

    def create(self, clip: str, number: int) -> Path:
        """Writes a new file of a clip."""
        path = self.path(clip, number)
        path.write_bytes(numbered(self.path(clip).read_bytes(), number))
        return path


def encode(clip: Clip) -> bytes:
    file = io.BytesIO()
    options = {"preset": "medium", "crf": "26", "threads": "1", "g": str(clip.gop)}
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND, options=options)
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        stream.time_base = Fraction(1, FRAMES_PER_SECOND)
        for frame in frames(clip):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def frames(clip: Clip) -> Iterator[av.VideoFrame]:
    scene = np.asarray(picture(clip.width + STEP * STEPS_BEFORE_TURN, clip.height)).astype(np.int16)
    random = np.random.default_rng(SEED)
    shape = (PATTERNS, clip.height, clip.width, 1)
    noise = random.normal(0, DEVIATION, shape).astype(np.int16)
    for number in range(clip.seconds * FRAMES_PER_SECOND):
        step = clip.first_step + number
        # There and back again.
        place = step % (2 * STEPS_BEFORE_TURN)
        left = STEP * min(place, 2 * STEPS_BEFORE_TURN - place)
        pixels = scene[:, left : left + clip.width] + noise[step % PATTERNS]
        frame = av.VideoFrame.from_ndarray(pixels.clip(0, 255).astype(np.uint8), format="rgb24")
        frame.pts = number
        yield frame


def concatenate(files: list[tuple[bytes, int]]) -> bytes:
    """Returns a file with the samples of all files, each given with its seconds, in their order."""
    joined = io.BytesIO()
    with av.open(joined, "w", format="mp4") as target:
        stream, start = None, 0
        for file, seconds in files:
            with av.open(io.BytesIO(file)) as source:
                video = source.streams.video[0]
                if stream is None:
                    stream = target.add_stream_from_template(video)
                offset = int(start / video.time_base)
                for packet in source.demux(video):
                    if packet.dts is None:
                        continue
                    packet.pts += offset
                    packet.dts += offset
                    packet.stream = stream
                    target.mux(packet)
            start += seconds
    return joined.getvalue()
