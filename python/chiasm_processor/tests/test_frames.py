"""Tests of frames that a child of the fork server decodes, with the clips of chiasm-video.

CHIASM_TEST_MODELS is the folder of the models (``cargo xtask models``).
"""

import json
import mmap
import os
import select
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

from chiasm_processor import frames
from chiasm_processor.child import receive
from chiasm_processor.limits import BeyondLimit, Limits
from chiasm_processor.messages import FramesCall

from .frontend import MEMORY_BYTES, Child, ForkServer, send
from .test_processor import flags

CLIPS = Path(__file__).parents[3] / "crates/chiasm-video/tests/clips"
CLIP = (CLIPS / "h264.mp4").read_bytes()
ROTATED = (CLIPS / "h264_rotated_90.mp4").read_bytes()


def frames_by_vllm(data: bytes) -> np.ndarray:
    """Returns all frames as vLLM's own loader reads them."""
    return VIDEO_LOADER_REGISTRY.load("opencv").load_bytes(data, num_frames=-1)[0]


def describe(data: bytes, positions: list[int], **changes: Any) -> dict[str, Any]:
    """Returns a call for frames of a clip of 60 frames."""
    call = {"length": len(data), "samples": 60, "positions": positions, "slots": 3}
    return call | {"width": 160, "height": 96} | changes


class Reader:
    """Reads the frames of a call."""

    def __init__(self, child: Child, data: bytes, call: dict[str, Any]) -> None:
        self.child = child
        self.call = call
        file = os.memfd_create("frames")
        os.truncate(file, MEMORY_BYTES)
        self.memory = mmap.mmap(file, 0)
        self.memory[: len(data)] = data
        send(child.connection, {"call": "frames", **call}, file)
        os.close(file)

    def receive(self) -> dict[str, Any]:
        return json.loads(receive(self.child.connection).content)

    def frame(self, reply: dict[str, Any]) -> np.ndarray:
        shape = (self.call["height"], self.call["width"], 3)
        count = np.prod(shape)
        return np.frombuffer(self.memory, np.uint8, count, reply["offset"]).reshape(shape).copy()

    def take(self) -> None:
        send(self.child.connection, {"call": "taken"})

    def read_all(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns all frames, and the last reply."""
        read: list[np.ndarray] = []
        while (reply := self.receive())["reply"] == "frame":
            assert reply["position"] == self.call["positions"][len(read)], reply
            read.append(self.frame(reply))
            if len(read) + self.call["slots"] <= len(self.call["positions"]):
                self.take()
        return read, reply


class FramesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.server = ForkServer("--address-space", str(4 << 30), "--", *flags("qwen2vl"))

    @classmethod
    def tearDownClass(cls) -> None:
        assert cls.server.close() == 0

    def read(self, data: bytes, call: dict[str, Any]) -> tuple[list[np.ndarray], dict[str, Any]]:
        return Reader(self.server.child(), data, call).read_all()

    def test_frames_equal_those_of_vllms_loader(self) -> None:
        for data, size in ((CLIP, {}), (ROTATED, {"width": 96, "height": 160})):
            expected = frames_by_vllm(data)
            for positions in ([0], [59], [3, 30, 31, 58], list(range(60))):
                read, reply = self.read(data, describe(data, positions, **size))
                self.assertEqual(reply, {"reply": "decoded"})
                self.assertTrue(np.array_equal(np.stack(read), expected[positions]))

    def test_child_waits_for_free_slot(self) -> None:
        positions = [5, 6, 7, 8, 9, 10]
        reader = Reader(self.server.child(), CLIP, describe(CLIP, positions, slots=2))
        first, second = reader.receive(), reader.receive()
        expected = frames_by_vllm(CLIP)
        begin = len(CLIP)
        self.assertEqual([first["offset"], second["offset"]], [begin, begin + 160 * 96 * 3])
        ready, _, _ = select.select([reader.child.connection], [], [], 0.5)
        self.assertEqual(ready, [])
        self.assertTrue(np.array_equal(reader.frame(first), expected[5]))
        reader.take()
        third = reader.receive()
        self.assertEqual((third["position"], third["offset"]), (7, begin))
        self.assertTrue(np.array_equal(reader.frame(second), expected[6]))

    def test_child_is_reused_after_frames(self) -> None:
        child = self.server.child()
        for positions in ([1, 2], [], list(range(20))):
            read, reply = Reader(child, CLIP, describe(CLIP, positions)).read_all()
            self.assertEqual((len(read), reply), (len(positions), {"reply": "decoded"}))
        self.assertEqual(child.item("video", CLIP)["reply"], "made")

    def test_other_frames_are_reported(self) -> None:
        # Its index comes first.
        truncated = (CLIPS / "h264_faststart.mp4").read_bytes()[:-2000]
        for data, changes, reason in (
            (CLIP, {"samples": 61}, "60 frames instead of 61"),
            (CLIP, {"samples": 59}, "more than 59 frames"),
            (CLIP, {"width": 96, "height": 160}, "has not 96x160 pixels"),
            (truncated, {}, "frames instead of 60"),
            (b"", {}, "cannot open"),
            (CLIP[:100], {}, "cannot open"),
        ):
            read, reply = self.read(data, describe(data, [0, 1, 58], **changes))
            self.assertEqual(reply["reply"], "different", reply)
            self.assertIn(reason, reply["reason"])

    def test_memory_without_room_is_refused(self) -> None:
        _, reply = self.read(CLIP, describe(CLIP, [0], width=8000, height=8000))
        self.assertEqual(reply["reply"], "refused")
        self.assertIn("do not fit", reply["reason"])

    def test_unexpected_message_ends_the_call(self) -> None:
        reader = Reader(self.server.child(), CLIP, describe(CLIP, list(range(10)), slots=1))
        self.assertEqual(reader.receive()["reply"], "frame")
        send(reader.child.connection, {"call": "prompt", "token_ids": [], "items": []})
        self.assertEqual(reader.receive()["reply"], "refused")
        reader.take()
        reader.child.wait_for_exit()

    def test_disconnected_child_exits(self) -> None:
        reader = Reader(self.server.child(), CLIP, describe(CLIP, list(range(10)), slots=1))
        self.assertEqual(reader.receive()["reply"], "frame")
        reader.child.connection.close()
        reader.child.wait_for_exit()


class LimitsTest(unittest.TestCase):
    def test_frame_size_beyond_limit_is_refused(self) -> None:
        call = FramesCall(**describe(CLIP, [0]))
        self.assertEqual(len(list(frames.decode(CLIP, call, Limits(video_pixels=160 * 96)))), 1)
        with self.assertRaisesRegex(BeyondLimit, "--max-video-pixels"):
            next(frames.decode(CLIP, call, Limits(video_pixels=160 * 96 - 1)))
        with (
            mock.patch.dict(os.environ, {"VLLM_MAX_IMAGE_PIXELS": "1000"}),
            self.assertRaisesRegex(ValueError, "VLLM_MAX_IMAGE_PIXELS"),
        ):
            next(frames.decode(CLIP, call, Limits()))


if __name__ == "__main__":
    unittest.main()
