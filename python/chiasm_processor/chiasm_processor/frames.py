"""Frames of a small video file, which OpenCV decodes as in vLLM, and the slots for them."""

import mmap
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from vllm.multimodal.video_decoders.base import check_frame_pixel_limit

# vLLM's own name for OpenCV, which is a placeholder without OpenCV.
from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin, cv2

from .fields import NoRoom
from .limits import Limits
from .messages import FramesCall


class Mismatch(Exception):
    """The file decodes to other frames than the call says."""


def decode(
    data: bytes, call: FramesCall, limits: Limits
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yields the position of each wanted frame, and its pixels in OpenCV's order of colours.

    Decodes to the end of the file: if a frame is missing there, earlier ones may be wrong.
    """
    check_frame_pixel_limit(call.width, call.height)
    limits.check_frame_size(call.width, call.height)
    # Never call `capture.release()`: OpenCV 5.0 crashes if the capture reads from Python.
    try:
        capture = OpenCVVideoBackendMixin.open_video_capture(data)
    except (ValueError, cv2.error) as error:
        raise Mismatch(f"OpenCV cannot open it: {error}") from error
    wanted = set(call.positions)
    for position in range(call.samples):
        if not capture.grab():
            raise Mismatch(f"it has {position} frames instead of {call.samples}")
        if position in wanted:
            is_read, frame = capture.retrieve()
            if not is_read or frame.shape != (call.height, call.width, 3):
                expected = f"{call.width}x{call.height} pixels"
                raise Mismatch(f"its frame {position} is unreadable or has not {expected}")
            yield position, frame
    if capture.grab():
        raise Mismatch(f"it has more than {call.samples} frames")


class Ring:
    """The slots in the memory behind the file. The frames take them in turn."""

    def __init__(self, memory: int, call: FramesCall) -> None:
        self._begin = call.length
        self._shape = (call.height, call.width, 3)
        self._frame_bytes = call.height * call.width * 3
        self._slots = call.slots
        end = self._begin + self._slots * self._frame_bytes
        if end > os.fstat(memory).st_size:
            raise NoRoom(f"{self._slots} frames do not fit into the memory")
        # Mapped, unlike the memory of tensors: the slots are written many times, so it is cheap that
        # the kernel clears them once.
        self._memory = mmap.mmap(memory, end)

    def write(self, number: int, frame: npt.NDArray[np.uint8]) -> int:
        """Writes the frame with this number in RGB to its slot. Returns the slot's offset."""
        offset = self._begin + number % self._slots * self._frame_bytes
        slot = np.frombuffer(self._memory, np.uint8, self._frame_bytes, offset)
        cv2.cvtColor(frame, cv2.COLOR_BGR2RGB, slot.reshape(self._shape))
        return offset
