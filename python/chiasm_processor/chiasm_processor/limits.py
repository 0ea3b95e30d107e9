"""How long videos and recordings may last, and how large a video's frames may be: nothing is made of what is beyond."""

import io
from importlib.util import find_spec
from typing import Any, NamedTuple


class BeyondLimit(ValueError):
    """The file lasts too long or is too large."""


class Limits(NamedTuple):
    """0 is no limit."""

    video_seconds: float = 0.0
    video_pixels: int = 0
    audio_seconds: float = 0.0

    def check_file(self, modality: str, data: bytes) -> None:
        """Asks a container what it says of itself, so that what is too large is not decoded. What can't be asked is for the decoders to
        refuse; what lies is found when it is decoded."""
        if modality not in ("video", "audio") or find_spec("av") is None:
            return
        import av

        try:
            container = av.open(io.BytesIO(data))
        except av.error.FFmpegError:
            return
        with container:
            # Microseconds.
            seconds = (container.duration or 0) / av.time_base
            frames = [stream.codec_context for stream in container.streams.video] if modality == "video" else []
        self._check(modality, seconds, max((frame.width * frame.height for frame in frames), default=0))

    def check_loaded(self, modality: str, loaded: Any) -> None:
        """The same, of what a file was decoded to."""
        match modality, getattr(loaded, "media", loaded):
            case "video", (frames, {"duration": seconds}):
                # Frames, rows, columns, colours.
                self._check(modality, seconds or 0, frames.shape[1] * frames.shape[2])
            case "audio", (samples, rate):
                self._check(modality, samples.shape[-1] / rate, 0)

    def _check(self, modality: str, seconds: float, pixels: int) -> None:
        most = self.video_seconds if modality == "video" else self.audio_seconds
        if most and seconds > most:
            raise BeyondLimit(f"the {modality} lasts {seconds:.1f} s, at most {most:g} s are allowed (--max-{modality}-seconds)")
        if self.video_pixels and pixels > self.video_pixels:
            raise BeyondLimit(f"the video's frames have {pixels} pixels, at most {self.video_pixels} are allowed (--max-video-pixels)")
