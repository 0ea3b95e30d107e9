"""vLLM's processor in `chiasm serve` and in its peers, in turns: the measuring half of `cargo xtask
bench-peers processor`.

    measure.py --chiasm PROGRAM --vllm PROGRAM --item PROGRAM --model DIR --dynamo VERSION \
        --rounds N [--short]

prints rows of `xtask/src/bench_peers/row.rs`, one JSON object per line. In each round each side
has a turn for each case, in an order that is shuffled each time.

| file | contents |
|---|---|
| `media` | a picture and clips that are all different; requests about them |
| `sides` | all sides |
| `servers`, `programs` | sides with HTTP; processes |
| `in_one_process`, `alone`, `turns` | sides that are Python processes with pipes |
"""

import argparse
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median

import av
import vllm

import media
from servers import Outcome, copy_model, cores, limit_frames
from sides import Measure, Sides, started

# The numbers of requests in a turn: ours, theirs.
REPEATED = {"image": (100, 10), "video": (30, 2)}
NEW = {"image": 6, "video": 2}
# The number of items in a turn in which as many as possible are processed.
MANY = {"image": 24, "video": 4}
# The number of prompts that are compared.
COMPARED = 3
WARM_UP_ROUNDS = 1
# All at once, as in vLLM's pull request 32104; fewer for one process, one after the other.
CLIPS, CLIPS_ALONE = 400, 40
# The seed of the order. The number has no meaning.
SEED = 20_261_123
REPEATED_ITEM = 0

OURS = "chiasm"


class Run:
    """The turns of all sides. `values` has their results by case, side and metric."""

    def __init__(self, sides: Sides, helpers: int, short: bool) -> None:
        self._sides, self._helpers, self._short = sides, helpers, short
        self._questions = count(1)
        self._items = count(REPEATED_ITEM + 1)
        self._random = random.Random(SEED)
        self.values: dict[tuple[str, str, str], float] = {}

    def rounds(self, rounds: int) -> None:
        outcomes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
        for number in range(WARM_UP_ROUNDS + rounds):
            is_warm = number >= WARM_UP_ROUNDS
            print(f"round {number} of {rounds}" if is_warm else "warming up", file=sys.stderr)
            turns = list(self._turns())
            self._random.shuffle(turns)
            for case, side, measure_side, kind, items in turns:
                if REPEATED_ITEM in items:
                    # Other items may have evicted it from caches.
                    measure_side(kind, [REPEATED_ITEM], self._new_questions(1))
                outcome = measure_side(kind, items, self._new_questions(len(items)))
                if is_warm:
                    outcomes[case, side].append(outcome)
        for (case, side), results in outcomes.items():
            self._add(case, side, results)

    def _turns(self) -> Iterator[tuple[str, str, Measure, str, list[int]]]:
        for kind in NEW:
            for side, measure_side in self._sides.frontends.items():
                repeated = REPEATED[kind][0 if side == OURS else 1]
                yield f"repeated {kind}", side, measure_side, kind, [REPEATED_ITEM] * repeated
                yield f"new {kind}", side, measure_side, kind, self._new_items(NEW[kind])
            many = f"many {kind}s"
            items = self._new_items(MANY[kind] * self._helpers)
            yield many, "helpers", self._measure_helpers, kind, items
            yield many, "alone", self._sides.alone, kind, self._new_items(MANY[kind])
            yield many, "item", self._sides.item, kind, self._new_items(MANY[kind])

    def _measure_helpers(self, kind: str, items: list[int], questions: list[int]) -> Outcome:
        # With this number of clients no helper waits for the next item.
        return self._sides.serve(kind, items, questions, clients=2 * self._helpers + 1)

    def compare(self) -> None:
        """Compares the prompts of all frontends, and the items of the sides that make them."""
        makers = {"alone": self._sides.alone, "item": self._sides.item}
        references = {side: OURS for side in self._sides.frontends if side != OURS}
        for kind in NEW:
            questions, items = self._new_questions(COMPARED), self._new_items(COMPARED)
            sides = self._sides.frontends | makers
            results = {
                side: measure_side(kind, items, questions).results
                for side, measure_side in sides.items()
            }
            self.values[kind, OURS, "prompt tokens"] = median(results[OURS])
            for side, reference in (references | {"alone": "item"}).items():
                pairs = zip(results[side], results[reference], strict=True)
                self.values[kind, side, "different"] = sum(a != b for a, b in pairs)

    def clips(self) -> None:
        clips, alone = (40, 8) if self._short else (CLIPS, CLIPS_ALONE)
        print(f"{clips} clips at once", file=sys.stderr)
        items, questions = self._new_items(clips), self._new_questions(clips)
        outcome = self._sides.serve("clip", items, questions, clients=clips)
        self.values["clips", "helpers", "clips"] = clips
        self.values["clips", "helpers", "prompt tokens"] = median(outcome.results)
        self._add("clips", "helpers", [outcome])
        items, questions = self._new_items(alone), self._new_questions(alone)
        self._add("clips", "alone", [self._sides.alone("clip", items, questions)])

    def _add(self, case: str, side: str, outcomes: list[Outcome]) -> None:
        """Adds medians over the rounds: the CPU time of an item in ms and the rate of items; and
        the median time in ms of the items of all rounds."""
        cpu = [outcome.cpu / len(outcome.times) for outcome in outcomes if outcome.cpu is not None]
        if cpu:
            self.values[case, side, "CPU"] = median(cpu) * 1e3
        rates = (len(outcome.times) / outcome.wall for outcome in outcomes)
        self.values[case, side, "rate"] = median(rates)
        times = (time for outcome in outcomes for time in outcome.times)
        self.values[case, side, "time"] = median(times)

    def _new_items(self, number: int) -> list[int]:
        return [next(self._items) for _ in range(number)]

    def _new_questions(self, number: int) -> list[int]:
        return [next(self._questions) for _ in range(number)]


class Rows:
    """The rows of a run."""

    def __init__(self, run: Run, dynamo: str) -> None:
        self._values = run.values
        version = vllm.__version__
        self._names = {
            "render": f"vllm launch render {version}",
            "render, no tensors": f"render without tensors (vLLM {version})",
            "in one process": f"one process (vLLM {version}, as Dynamo {dynamo})",
            "alone": f"decoding and processing alone (vLLM {version})",
        }

    def print(self) -> None:
        for kind in NEW:
            self._equality(kind)
            self._requests(kind)
            self._new(kind)
        self._clips()

    def _equality(self, kind: str) -> None:
        row(kind, "prompt", "tokens", self._values[kind, OURS, "prompt tokens"])
        for side, name in self._names.items():
            different = self._values[kind, side, "different"]
            unit = "items" if side == "alone" else "prompts"
            row(kind, "others", unit, COMPARED, name, different, equal=different == 0)

    def _requests(self, kind: str) -> None:
        new, repeated = f"new {kind}", f"repeated {kind}"
        for case, ours, theirs in (
            (f"{repeated}, theirs new", repeated, new),
            (f"{repeated}, theirs repeated too", repeated, repeated),
            (new, new, new),
        ):
            for metric, measured in ("CPU per request", "CPU"), ("latency p50", "time"):
                for side in list(self._names)[:3]:
                    sides = (ours, OURS), (theirs, side)
                    self._compare(case, metric, "ms", kind, sides, measured)

    def _new(self, kind: str) -> None:
        many = f"many {kind}s"
        sides = (many, "helpers"), (many, "alone")
        self._compare(f"new {kind}s", "items per second", "items/s", kind, sides, "rate")
        self._compare(f"new {kind}s", "CPU per item", "ms", kind, sides, "CPU")
        sides = (many, "item"), (many, "alone")
        self._compare(f"new {kind}", "one call", "ms", kind, sides, "time")

    def _clips(self) -> None:
        case, side = "captioning of clips", ("clips", "helpers")
        row(case, "clips at once", "clips", self._values[*side, "clips"])
        row(case, "prompt", "tokens", self._values[*side, "prompt tokens"])
        sides = side, ("clips", "alone")
        metric = "clips per second of CPU time"
        self._compare(case, metric, "clips/s", "video", sides, "CPU")
        self._compare(case, "clips per second", "clips/s", "video", sides, "rate")

    def _compare(
        self,
        case: str,
        metric: str,
        unit: str,
        kind: str,
        sides: tuple[tuple[str, str], tuple[str, str]],
        measured: str,
    ) -> None:
        """Prints the row of a measured value of two sides, which are given by case and side."""
        ours, theirs = (self._values[*side, measured] for side in sides)
        # A call is a multiple of its limit. Other ratios are the factor by which we are better.
        ratio = ours / theirs if measured == "rate" or metric == "one call" else theirs / ours
        if unit == "clips/s" and measured == "CPU":
            ours, theirs = 1e3 / ours, 1e3 / theirs
        peer = sides[1][1]
        equal = self._values[kind, peer, "different"] == 0
        row(case, metric, unit, ours, self._names[peer], theirs, ratio, equal)


def row(
    case: str,
    metric: str,
    unit: str,
    ours: float,
    peer_name: str = OURS,
    peer: float | None = None,
    ratio: float | None = None,
    equal: bool | None = None,
) -> None:
    fields = {"case": case, "metric": metric, "unit": unit, "ours": ours}
    fields |= {"peer_name": peer_name, "peer": peer, "ratio": ratio, "equal": equal}
    print(json.dumps(fields), flush=True)


def measure(arguments: argparse.Namespace, scratch: Path) -> None:
    files, model = scratch / "media", scratch / "model"
    files.mkdir()
    media.make(files)
    copy_model(Path(arguments.model), model)
    limit_frames(model)
    helpers = max(cores() - 1, 1)
    row("all", "rounds", "rounds", arguments.rounds, peer=arguments.rounds)
    row("all", "helpers", "processes", helpers)
    for kind in media.KINDS:
        maker = "Pillow" if kind == "image" else f"libx264 of PyAV {av.__version__}"
        row(kind, "file", "kB", (files / kind).stat().st_size / 1e3, maker)
    with started(arguments, model, files, scratch, helpers, CLIPS) as sides:
        run = Run(sides, helpers, arguments.short)
        run.compare()
        run.rounds(arguments.rounds)
        run.clips()
    Rows(run, arguments.dynamo).print()


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("chiasm", "vllm", "item", "model", "dynamo"):
        parser.add_argument(f"--{flag}", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--short", action="store_true")
    with tempfile.TemporaryDirectory(prefix="chiasm-bench-processor-") as scratch:
        measure(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    main()
