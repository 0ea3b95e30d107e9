"""Durations and sizes of real files. The clips are those of the Rust tests."""

import base64
import io
import unittest
from pathlib import Path

import av
from PIL import Image
from vllm.multimodal.media import MediaConnector

from chiasm_processor.limits import BeyondLimit, Limits
from chiasm_processor.processor import FRAMES, Connector

CLIPS = Path(__file__).parents[3] / "crates/chiasm/tests/clips"
VIDEO, AUDIO = (CLIPS / "with_sound.mp4").read_bytes(), (CLIPS / "opus.ogg").read_bytes()


def facts(data: bytes) -> tuple[float, int]:
    """Seconds, and pixels of a frame."""
    with av.open(io.BytesIO(data)) as container:
        size = next((stream.codec_context.width * stream.codec_context.height for stream in container.streams.video), 0)
        return container.duration / av.time_base, size


class LimitsTest(unittest.TestCase):
    def test_files_are_held_against_limits_before_and_after_they_are_decoded(self) -> None:
        video, audio = Connector(VIDEO, {}).fetch_video(""), Connector(AUDIO, {}).fetch_audio("")
        (seconds, pixels), (sound, _) = facts(VIDEO), facts(AUDIO)
        for modality, data, loaded, length, flag in (
            ("video", VIDEO, video, seconds, "--max-video-seconds"),
            ("audio", AUDIO, audio, sound, "--max-audio-seconds"),
        ):
            for limits in (Limits(), Limits(length * 1.1, pixels, length * 1.1)):
                limits.check_file(modality, data)
                limits.check_loaded(modality, loaded)
            short = Limits(video_seconds=length * 0.9, audio_seconds=length * 0.9)
            for check in (lambda: short.check_file(modality, data), lambda: short.check_loaded(modality, loaded)):
                with self.assertRaisesRegex(BeyondLimit, flag):
                    check()
        small = Limits(video_pixels=pixels - 1)
        for check in (lambda: small.check_file("video", VIDEO), lambda: small.check_loaded("video", video)):
            with self.assertRaisesRegex(BeyondLimit, "--max-video-pixels"):
                check()
        # The sound of a video is a recording, whatever the size of its frames.
        small.check_file("audio", VIDEO)

    def test_what_is_no_file_of_its_kind_is_left_to_the_decoders(self) -> None:
        for data in (b"", b"no video", VIDEO[:50], AUDIO[:10]):
            Limits(1e-9, 1, 1e-9).check_file("video", data)
        Limits(1e-9, 1, 1e-9).check_file("image", VIDEO)


class FramesTest(unittest.TestCase):
    def test_a_list_of_frames_is_what_vllm_makes_of_its_url(self) -> None:
        buffer = io.BytesIO()
        Image.linear_gradient("L").convert("RGB").save(buffer, "JPEG")
        url = FRAMES + b",".join([base64.b64encode(buffer.getvalue())] * 3)
        (frames, metadata), (expected, metadata_there) = Connector(url, {}).fetch_video(""), MediaConnector().fetch_video(url.decode())
        self.assertEqual((frames.shape, metadata), ((3, 256, 256, 3), metadata_there))
        self.assertTrue((frames == expected).all())
        with self.assertRaises(BeyondLimit):
            Limits(video_pixels=256 * 255).check_loaded("video", Connector(url, {}).fetch_video(""))
        for broken in (FRAMES, FRAMES + b"!!", url[:-1], FRAMES + b"\xff"):
            with self.assertRaises(ValueError):
                Connector(broken, {}).fetch_video("")


if __name__ == "__main__":
    unittest.main()
