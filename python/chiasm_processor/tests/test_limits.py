"""Tests of limits on the duration and size of real files, with the clips of the Rust tests."""

import base64
import io
import unittest
from pathlib import Path

import av
from PIL import Image
from vllm.multimodal.media import MediaConnector

from chiasm_processor.limits import BeyondLimit, Limits
from chiasm_processor.processor import FRAME_LIST_PREFIX, BytesConnector

CLIPS = Path(__file__).parents[3] / "crates/chiasm/tests/clips"
VIDEO = (CLIPS / "with_sound.mp4").read_bytes()
AUDIO = (CLIPS / "opus.ogg").read_bytes()


def duration_and_pixels(data: bytes) -> tuple[float, int]:
    """Returns the duration in seconds, and the pixels of a frame; 0 pixels without video."""
    with av.open(io.BytesIO(data)) as container:
        frames = (stream.codec_context for stream in container.streams.video)
        pixels = next((frame.width * frame.height for frame in frames), 0)
        return container.duration / av.time_base, pixels


class LimitsTest(unittest.TestCase):
    def test_file_beyond_limit_is_refused(self) -> None:
        video = BytesConnector(VIDEO, {}).fetch_video("")
        audio = BytesConnector(AUDIO, {}).fetch_audio("")
        video_seconds, pixels = duration_and_pixels(VIDEO)
        audio_seconds, _ = duration_and_pixels(AUDIO)
        for modality, data, loaded, seconds, flag in (
            ("video", VIDEO, video, video_seconds, "--max-video-seconds"),
            ("audio", AUDIO, audio, audio_seconds, "--max-audio-seconds"),
        ):
            for limits in (Limits(), Limits(seconds * 1.1, pixels, seconds * 1.1)):
                limits.check_file(modality, data)
                limits.check_loaded(modality, loaded)
            short = Limits(video_seconds=seconds * 0.9, audio_seconds=seconds * 0.9)
            for check in (
                lambda: short.check_file(modality, data),
                lambda: short.check_loaded(modality, loaded),
            ):
                with self.assertRaisesRegex(BeyondLimit, flag):
                    check()
        small = Limits(video_pixels=pixels - 1)
        for check in (
            lambda: small.check_file("video", VIDEO),
            lambda: small.check_loaded("video", video),
        ):
            with self.assertRaisesRegex(BeyondLimit, "--max-video-pixels"):
                check()
        # The sound of a video is audio, so the frame size does not matter.
        small.check_file("audio", VIDEO)

    def test_unreadable_file_is_left_to_decoders(self) -> None:
        for data in (b"", b"no video", VIDEO[:50], AUDIO[:10]):
            Limits(1e-9, 1, 1e-9).check_file("video", data)
        Limits(1e-9, 1, 1e-9).check_file("image", VIDEO)


class FramesTest(unittest.TestCase):
    def test_frame_list_decodes_as_in_vllm(self) -> None:
        buffer = io.BytesIO()
        Image.linear_gradient("L").convert("RGB").save(buffer, "JPEG")
        url = FRAME_LIST_PREFIX + b",".join([base64.b64encode(buffer.getvalue())] * 3)
        frames, metadata = BytesConnector(url, {}).fetch_video("")
        expected, expected_metadata = MediaConnector().fetch_video(url.decode())
        self.assertEqual((frames.shape, metadata), ((3, 256, 256, 3), expected_metadata))
        self.assertTrue((frames == expected).all())
        with self.assertRaises(BeyondLimit):
            video = BytesConnector(url, {}).fetch_video("")
            Limits(video_pixels=256 * 255).check_loaded("video", video)
        for broken in (
            FRAME_LIST_PREFIX,
            FRAME_LIST_PREFIX + b"!!",
            url[:-1],
            FRAME_LIST_PREFIX + b"\xff",
        ):
            with self.assertRaises(ValueError):
                BytesConnector(broken, {}).fetch_video("")


if __name__ == "__main__":
    unittest.main()
