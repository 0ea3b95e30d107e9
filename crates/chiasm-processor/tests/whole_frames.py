"""Writes all frames of videos as vLLM's loader reads them.

    python whole_frames.py CLIPS FOLDER

Reads lines with the names of files in CLIPS. For each it writes FOLDER/NAME, the RGB bytes of the
frames, and prints a line when that is done.
"""

import sys
from pathlib import Path

from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

clips, folder = map(Path, sys.argv[1:])
loader = VIDEO_LOADER_REGISTRY.load("opencv")
for line in sys.stdin:
    name = line.strip()
    frames, metadata = loader.load_bytes((clips / name).read_bytes(), num_frames=-1)
    assert list(metadata["frames_indices"]) == list(range(len(frames))), name
    (folder / name).write_bytes(frames.tobytes())
    print(name, flush=True)
