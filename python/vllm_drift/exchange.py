#!/usr/bin/env python3
"""Exchanges messages with Chiasm over files, encoded and decoded by vLLM's own types.

usage: exchange.py FOLDER

Runs in an environment with the vLLM to test. The test ``vllm_exchange`` of ``chiasm-sim-engine``
writes ``requests.json`` and its frames to FOLDER, and then reads ``outputs.json``. Prints the
requests that are decoded to other values than intended. Exits with 1 if there are any, and with 3
if this vLLM can't be imported.
"""

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CANNOT_IMPORT = 3


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        import outputs_of_vllm
        import requests_to_vllm
    except Exception as error:
        # In one line, which xtask prints.
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")
        sys.exit(CANNOT_IMPORT)

    wrong = 0
    try:
        write_outputs(folder, outputs_of_vllm.messages())
    except Exception:
        traceback.print_exc()
        print("the outputs could not be written")
        wrong += 1
    requests = json.loads((folder / "requests.json").read_text())
    for request in requests:
        name = request["name"]
        # Writable like the frames of a socket: torch warns about others.
        frames = [
            bytearray((folder / f"{name}.f{number}").read_bytes())
            for number in range(request["frames"])
        ]
        try:
            problems = requests_to_vllm.problems(request["kind"], frames, request["means"])
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        print(f"{name}: {'; '.join(problems) or 'decoded as intended'}")
        wrong += bool(problems)
    if wrong or not requests:
        sys.exit(1)


def write_outputs(folder: Path, messages: Iterator[tuple[str, str, Any, list[bytes]]]) -> None:
    """Writes the frames and ``outputs.json`` to a folder."""
    written = []
    for name, kind, meaning, frames in messages:
        for number, frame in enumerate(frames):
            (folder / f"{name}.f{number}").write_bytes(frame)
        written.append({"name": name, "kind": kind, "frames": len(frames), "means": meaning})
    (folder / "outputs.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main()
