"""Videos that `chiasm serve` plans and cuts, and vLLM's own loader and processor, in turns: the
measuring half of `cargo xtask bench-peers video`.

    videos.py --chiasm PROGRAM --vllm PROGRAM --index PROGRAM --model DIR --rounds N [--short]

prints rows of `xtask/src/bench_peers/row.rs`, one JSON object per line. In each round each side
has a turn for each case, in an order that is shuffled each time. A turn has one new file.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import av
import cv2
import vllm

import servers
from long_videos import CAPTIONED, CASES, CLIPS, Case, Videos, loader_settings
from measure import OURS, row
from servers import MODEL, Outcome, Server, copy_model, cores, limit_frames
from sides import HERE, Process

# The number of requests in a turn of a clip that the engine holds.
REPEATED_REQUESTS = 100
WARM_UP_ROUNDS = 1
# `chiasm serve` gets so many clips at once; the loader gets fewer, one after the other.
CAPTIONS, CAPTIONS_ALONE = 400, 40
SEED = 20_261_127
# The simulated engine's description of an item ends with the digest of its pixels.
DIGEST = re.compile(r"tokens, ([0-9a-f]{8})\)")
# Enough for the description; a repeated clip's answer has the first tokens only, because each token
# costs time.
ANSWER_TOKENS, FIRST_TOKENS = 64, 4
# The maximum CPU time of a request with a known clip.
REPEATED_LIMIT_MS = 0.5
# The maximum time to read the index of 18,000 samples and to plan the cut.
PLAN_LIMIT_MS = 25.0
# The maximum part of the bytes of ten minutes that is sent to another machine.
MAX_CUT_PART = 0.2
# Unlike any digest.
NO_DIGEST = -1
LIMIT = "limit"
THEIRS = f"loader and processor (vLLM {vllm.__version__}, OpenCV {cv2.__version__})"
LONGEST = "10 min"
SHORTEST = "4 s of 360p"


def digest(answer: bytes) -> int:
    """Returns the digest of the pixels that the engine got, if its answer is long enough."""
    text = json.loads(answer)["choices"][0]["message"]["content"]
    found = DIGEST.search(text)
    return int(found[1], 16) if found else NO_DIGEST


class Run:
    """The turns of both sides."""

    def __init__(self, videos: Videos, server: Server, loader: Process) -> None:
        self._videos, self._server, self._loader = videos, server, loader
        self._numbers = count(1)
        self._random = random.Random(SEED)

    def compare(self) -> dict[str, bool]:
        """Returns whether the pixels of both sides are equal, for each case."""
        return {name: self._are_equal(case) for name, case in CASES.items()}

    def captions_are_equal(self) -> bool:
        return self._are_equal(CAPTIONED)

    def _are_equal(self, case: Case) -> bool:
        path = self._videos.create(case.clip, next(self._numbers))
        ours, theirs = self._ours(case, path), self._theirs(case, path)
        path.unlink()
        return ours.results == theirs.results

    def rounds(self, rounds: int) -> dict[tuple[str, str], list[Outcome]]:
        outcomes = defaultdict(list)
        sides = (OURS, self._ours), ("theirs", self._theirs)
        for number in range(WARM_UP_ROUNDS + rounds):
            is_warm = number >= WARM_UP_ROUNDS
            print(f"round {number} of {rounds}" if is_warm else "warming up", file=sys.stderr)
            turns = [(name, *side) for name in CASES for side in sides]
            self._random.shuffle(turns)
            for name, side, measure in turns:
                case = CASES[name]
                path = self._videos.create(case.clip, next(self._numbers))
                outcome = measure(case, path)
                path.unlink()
                if is_warm:
                    outcomes[name, side].append(outcome)
            outcome = self._repeated(CASES[SHORTEST])
            if is_warm:
                outcomes["repeated", OURS].append(outcome)
        return outcomes

    def captions(self, clips: int, alone: int) -> tuple[Outcome, Outcome]:
        """Measures new clips that all arrive at the same time."""
        print(f"{clips} clips at once", file=sys.stderr)
        paths = [self._videos.create(CAPTIONED.clip, next(self._numbers)) for _ in range(clips)]
        bodies = [self._request(CAPTIONED, path) for path in paths]
        ours = self._server.send_all(bodies, clients=clips)
        few = paths[:alone]
        theirs = self._loader.measure_all([(str(path), CAPTIONED.frames) for path in few])
        for path in paths:
            path.unlink()
        return ours, theirs

    def _ours(self, case: Case, path: Path) -> Outcome:
        return self._server.send_all([self._request(case, path)], clients=1)

    def _theirs(self, case: Case, path: Path) -> Outcome:
        return self._loader.measure_all([(str(path), case.frames)])

    def _repeated(self, case: Case) -> Outcome:
        path = self._videos.path(case.clip)
        body = self._request(case, path) | {"max_tokens": FIRST_TOKENS}
        bodies = [body] * REPEATED_REQUESTS
        # Other clips may have evicted it.
        self._server.send_all(bodies[:1], clients=1)
        return self._server.send_all(bodies, clients=1)

    def _request(self, case: Case, path: Path) -> dict[str, Any]:
        content = [
            {"type": "video_url", "video_url": {"url": f"file://{path}"}},
            {"type": "text", "text": f"Question {next(self._numbers):08}: what is to be seen?"},
        ]
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": ANSWER_TOKENS,
            "media_io_kwargs": loader_settings(case.frames),
        }


class Loader(Process):
    """vLLM's own loader and processor."""

    def measure_all(self, files: list[tuple[str, int]]) -> Outcome:
        """Measures files with their numbers of frames."""
        outcomes = [self.measure(path, [0], [frames]) for path, frames in files]
        times = [time for outcome in outcomes for time in outcome.times]
        results = [result for outcome in outcomes for result in outcome.results]
        wall = sum(outcome.wall for outcome in outcomes)
        cpu = sum(outcome.cpu or 0.0 for outcome in outcomes)
        return Outcome(times, wall, cpu, results)


def print_rows(
    outcomes: dict[tuple[str, str], list[Outcome]],
    equal: dict[str, bool],
) -> None:
    for name in CASES:
        for metric, read in (
            ("CPU", lambda outcome: outcome.cpu * 1e3),
            ("time", lambda outcome: outcome.wall * 1e3),
        ):
            ours, theirs = (
                median(map(read, outcomes[name, side])) for side in (OURS, "theirs")
            )
            row(name, metric, "ms", ours, THEIRS, theirs, theirs / ours, equal[name])
    repeated = [outcome.cpu / len(outcome.times) * 1e3 for outcome in outcomes["repeated", OURS]]
    print_limited("repeated clip", "CPU per request", "ms", median(repeated), REPEATED_LIMIT_MS)


def print_limited(case: str, metric: str, unit: str, ours: float, limit: float) -> None:
    row(case, metric, unit, ours, LIMIT, limit, ours / limit)


def print_captions(ours: Outcome, theirs: Outcome, is_equal: bool) -> None:
    row("captions", "clips at once", "clips", len(ours.times))
    for metric, seconds in (
        ("clips per second of CPU time", (ours.cpu, theirs.cpu)),
        ("clips per second", (ours.wall, theirs.wall)),
    ):
        rates = [len(side.times) / time for side, time in zip((ours, theirs), seconds, strict=True)]
        ratio = rates[0] / rates[1]
        row("captions", metric, "clips/s", rates[0], THEIRS, rates[1], ratio, is_equal)


def print_plan(program: str, file: Path) -> None:
    """Measures the index and the cut of a file."""
    command = [program, str(file)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    index, cut = (
        float(re.search(rf"^{name}.*: median ([\d.]+) ms", text, re.MULTILINE)[1])
        for name in ("index", "cut")
    )
    print_limited(LONGEST, "index and cut, CPU", "ms", index + cut, PLAN_LIMIT_MS)
    part = float(re.search(r"([\d.]+) % of the bytes", text)[1]) / 100
    print_limited(LONGEST, "bytes of the cut", "of the file", part, MAX_CUT_PART)


def measure(arguments: argparse.Namespace, scratch: Path) -> None:
    files, model = scratch / "media", scratch / "model"
    files.mkdir()
    start = time.monotonic()
    videos = Videos(files)
    print(f"the clips took {time.monotonic() - start:.0f} s", file=sys.stderr)
    copy_model(Path(arguments.model), model)
    limit_frames(model)
    helpers = max(cores() - 1, 1)
    row("all", "rounds", "rounds", arguments.rounds, peer=arguments.rounds)
    row("all", "helpers", "processes", helpers)
    maker = f"libx264 of PyAV {av.__version__}"
    for name in CLIPS:
        row(name, "file", "kB", videos.path(name).stat().st_size / 1e3, maker)
    print_plan(arguments.index, videos.path(CASES[LONGEST].clip))
    flags = ["--allowed-local-media-path", str(files), "--trust-request-mm-kwargs"]
    server = servers.chiasm(
        arguments.chiasm, arguments.vllm, model, helpers, CAPTIONS, scratch, flags, digest
    )
    python = [sys.executable, "-s", "-B", str(HERE / "loader.py"), str(model)]
    loader = Loader("loader", python, scratch, has_pipes=True)
    try:
        loader.answer()
        server.wait("/ready")
        run = Run(videos, server, loader)
        equal = run.compare()
        outcomes = run.rounds(arguments.rounds)
        print_rows(outcomes, equal)
        clips, alone = (40, 8) if arguments.short else (CAPTIONS, CAPTIONS_ALONE)
        are_equal = run.captions_are_equal()
        print_captions(*run.captions(clips, alone), are_equal)
    finally:
        loader.stop()
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("chiasm", "vllm", "index", "model"):
        parser.add_argument(f"--{flag}", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--short", action="store_true")
    with tempfile.TemporaryDirectory(prefix="chiasm-bench-videos-") as scratch:
        measure(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    main()
