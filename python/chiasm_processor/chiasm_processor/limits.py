"""Limits on the duration of videos and audio, and on the frame size of videos.

A file beyond a limit is refused.
"""

import io
from importlib.util import find_spec
from typing import Any, NamedTuple


class BeyondLimit(ValueError):
    """The file lasts too long or is too large."""


class Limits(NamedTuple):
    """The limits; 0 for no limit."""

    video_seconds: float = 0.0
    video_pixels: int = 0
    audio_seconds: float = 0.0

    def check_file(self, modality: str, data: bytes) -> None:
        """Checks the properties in a container's header, so that no file beyond them is decoded.

        A file with an unreadable header is left to the decoders. A false header is detected after
        decoding.
        """
        if modality not in ("video", "audio") or find_spec("av") is None:
            return
        import av

        try:
            container = av.open(io.BytesIO(data))
        except av.error.FFmpegError:
            return
        with container:
            # The duration is in microseconds.
            seconds = (container.duration or 0) / av.time_base
            streams = container.streams.video if modality == "video" else []
            frames = [stream.codec_context for stream in streams]
        pixels = max((frame.width * frame.height for frame in frames), default=0)
        self._check(modality, seconds, pixels)

    def check_frame_size(self, width: int, height: int) -> None:
        """Checks the frame size of a video whose duration was checked before."""
        self._check("video", 0, width * height)

    def check_loaded(self, modality: str, loaded: Any) -> None:
        """Checks a decoded file."""
        match modality, getattr(loaded, "media", loaded):
            case "video", (frames, {"duration": seconds}):
                # The dimensions are frames, rows, columns and colours.
                self._check(modality, seconds or 0, frames.shape[1] * frames.shape[2])
            case "audio", (samples, rate):
                self._check(modality, samples.shape[-1] / rate, 0)

    def _check(self, modality: str, seconds: float, pixels: int) -> None:
        max_seconds = self.video_seconds if modality == "video" else self.audio_seconds
        if max_seconds and seconds > max_seconds:
            raise BeyondLimit(
                f"the {modality} lasts {seconds:.1f} s, "
                f"at most {max_seconds:g} s are allowed (--max-{modality}-seconds)"
            )
        if self.video_pixels and pixels > self.video_pixels:
            raise BeyondLimit(
                f"the video's frames have {pixels} pixels, "
                f"at most {self.video_pixels} are allowed (--max-video-pixels)"
            )
