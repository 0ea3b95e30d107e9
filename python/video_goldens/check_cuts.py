#!/usr/bin/env python3
"""Compares the frames of cuts with those of whole files, bit for bit.

    python check_cuts.py FOLDER

Needs opencv-python-headless 5.0. FOLDER has a `manifest.json`, which the test `real_opencv` of
chiasm-video writes: a list of cuts, each with the path of the clip, the path of the small file, its
number of samples, and pairs of a frame's number in the clip and in the small file.
"""

import functools
import json
import sys
from collections import defaultdict
from pathlib import Path

from counting import read_frames


@functools.cache
def frames_of_clip(path):
    return read_frames(Path(path).read_bytes())


def check(cut, folder):
    """Returns the number of equal frames, and a complaint or `None`."""
    whole = frames_of_clip(cut["clip"])
    small = read_frames((folder / cut["file"]).read_bytes())
    equal = 0
    for frame, position in cut["frames"]:
        is_there = frame < len(whole) and position < len(small)
        equal += is_there and whole[frame] is not None and whole[frame] == small[position]
    if equal < len(cut["frames"]):
        return equal, f"{equal} of {len(cut['frames'])} frames are equal"
    if len(small) != cut["samples"]:
        return equal, f"{len(small)} frames of {cut['samples']} samples"
    return equal, None


def main():
    folder = Path(sys.argv[1])
    complaints = []
    cuts = json.loads((folder / "manifest.json").read_text())
    totals = defaultdict(lambda: [0, 0])
    for cut in cuts:
        equal, complaint = check(cut, folder)
        name = Path(cut["clip"]).name
        totals[name][0] += equal
        totals[name][1] += len(cut["frames"])
        if complaint:
            complaints.append(f"{name}, {cut['file']}: {complaint}")
    for name, (equal, wanted) in totals.items():
        print(f"{name}: {equal} of {wanted} frames equal")
    print(f"{len(cuts)} cuts of {len(totals)} clips, {len(complaints)} of them wrong")
    print("\n".join(complaints))
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
