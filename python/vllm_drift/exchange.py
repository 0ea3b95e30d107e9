#!/usr/bin/env python3
"""Exchanges messages with Chiasm, over files: reads its requests with vLLM's own types, writes outputs with them.

usage: exchange.py FOLDER

Runs in an environment with the vLLM that is asked about. FOLDER has ``requests.json`` and the frames that it names, written by the
test ``vllm_exchange`` of ``chiasm-sim-engine``, which then reads ``outputs.json``. Says what is read in another sense than it was
written. Exits with 1 if there is such a message, with 3 if this vLLM can't be imported.
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
        # In one line, which xtask passes on.
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
        # Writable, as the frames of a socket are: torch warns of others.
        frames = [bytearray((folder / f"{name}.f{number}").read_bytes()) for number in range(request["frames"])]
        try:
            problems = requests_to_vllm.problems(request["kind"], frames, request["means"])
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        print(f"{name}: {'; '.join(problems) or 'read as meant'}")
        wrong += bool(problems)
    if wrong or not requests:
        sys.exit(1)


def write_outputs(folder: Path, messages: Iterator[tuple[str, str, Any, list[bytes]]]) -> None:
    written = []
    for name, kind, means, frames in messages:
        for number, frame in enumerate(frames):
            (folder / f"{name}.f{number}").write_bytes(frame)
        written.append({"name": name, "kind": kind, "frames": len(frames), "means": means})
    (folder / "outputs.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main()
