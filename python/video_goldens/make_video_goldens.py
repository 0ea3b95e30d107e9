#!/usr/bin/env python3
"""Writes the golden values of chiasm-video: what OpenCV says of each clip, and its frames.

    python make_video_goldens.py [FOLDER]

Needs opencv-python-headless 5.0; with vLLM installed, its own count must agree. Reads
crates/chiasm-video/tests/clips, which `make_clips.py` makes, or another folder of clips, and writes
`index.json` there. An entry has the number of frames by vLLM's counting, OpenCV's rate, fourcc and
rotation, the size of the frames, and the hash of each frame's RGB bytes; or an `error`. Frames that
differ between two runs, or never, have no hashes.
"""

import json
import sys
from pathlib import Path

import cv2

from counting import count, open_capture, read_frames

CLIPS = Path(__file__).resolve().parents[2] / "crates/chiasm-video/tests/clips"


def count_with_vllm(data):
    """Returns vLLM's own count of frames; `None` without vLLM."""
    try:
        from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin
    except ImportError:
        return None
    capture = OpenCVVideoBackendMixin.open_video_capture(data)
    return OpenCVVideoBackendMixin.get_video_metadata(capture).total_frames_num


def describe(data):
    capture = open_capture(data)
    if capture is None:
        return {"error": "not opened"}
    header_frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    frames, fps = count(capture)
    assert count_with_vllm(data) in (None, frames)
    fourcc = int(capture.get(cv2.CAP_PROP_FOURCC)).to_bytes(4, "little").decode("latin-1")
    rotation = int(capture.get(cv2.CAP_PROP_ORIENTATION_META))
    decoded = read_frames(data)
    if not decoded or None in decoded:
        return {"error": "not decoded", "frames": frames, "fps": repr(fps)}
    height, width = decoded[0][0]
    entry = {
        "frames": frames,
        "header_frames": header_frames,
        "decoded": len(decoded),
        "fps": repr(fps),
        "width": width,
        "height": height,
        "rotation": rotation,
        "fourcc": fourcc,
    }
    # OpenCV returns the same stale memory for all frames of an interlaced clip.
    is_stale = len(decoded) > 2 and len(set(decoded)) == 1
    if decoded == read_frames(data) and not is_stale:
        entry["rgb_sha256"] = " ".join(digest for _, digest in decoded)
    return entry


def main():
    clips = Path(sys.argv[1]) if len(sys.argv) > 1 else CLIPS
    entries = {}
    for path in sorted(clips.iterdir()):
        if path.suffix != ".json":
            entries[path.name] = describe(path.read_bytes())
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    text = ",\n".join(lines)
    (clips / "index.json").write_text(f"{{\n{text}\n}}\n")
    print(f"{len(entries)} clips, OpenCV {cv2.__version__}")


if __name__ == "__main__":
    main()
