"""Counts and decodes frames with OpenCV as vLLM does."""

import hashlib
from io import BytesIO

import cv2


def open_capture(data):
    """Opens a video as vLLM does. Returns `None` if OpenCV cannot."""
    capture = cv2.VideoCapture(BytesIO(data), cv2.CAP_FFMPEG, [])
    return capture if capture.isOpened() else None


def count(capture):
    """Returns the number of frames and the rate as `get_video_metadata` of vLLM does."""
    frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    fps = capture.get(cv2.CAP_PROP_FPS)
    if frames > 0 and capture.set(cv2.CAP_PROP_POS_AVI_RATIO, 1.0):
        visible = int(capture.get(cv2.CAP_PROP_POS_FRAMES))
        at_end = not capture.grab()
        capture.set(cv2.CAP_PROP_POS_FRAMES, 0)
        if at_end and 0 < visible < frames - 1:
            frames = visible
    return frames, fps


def read_frames(data):
    """Returns the shape and the hash of the RGB bytes of each frame that `grab` yields."""
    capture = open_capture(data)
    frames = []
    # Never `release`: OpenCV 5.0 crashes on a capture that reads from Python.
    while capture.grab():
        ok, frame = capture.retrieve()
        if not ok:
            frames.append(None)
            continue
        rgb = cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
        frames.append((rgb.shape[:2], hashlib.sha256(rgb.tobytes()).hexdigest()[:12]))
    return frames
