"""vLLM's processor through `chiasm serve` and by its peers, in turns: the measuring half of `cargo xtask bench-peers processor`.

    measure.py --chiasm PROGRAM --vllm PROGRAM --item PROGRAM --model DIR --rounds N [--short]

prints versions, then one JSON object per result: `{"case", "side", "metric", "value"}`. In each round each side is asked for each
case, in an order that is shuffled each time.

| file | is |
|---|---|
| `media`, `chat` | a picture and clips, no two alike; requests about them |
| `sides` | all sides, started and ended |
| `servers`, `programs` | sides that are asked over HTTP; processes |
| `in_one_process`, `alone`, `turns` | sides that are processes of Python, told over pipes |
| `outcome` | what asking comes to |
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
from outcome import Outcome
from servers import copy_of_model, cores
from sides import Ask, Sides, started

# Of how many requests each turn is: ours, theirs.
REPEATED = {"image": (100, 10), "video": (30, 2)}
NEW = {"image": 6, "video": 2}
# Items of a turn in which as many as possible are made.
MADE = {"image": 24, "video": 4}
# Prompts that are compared.
COMPARED = 3
# A round before the first warms up.
WARM_UP = 1
# All at once, as in vLLM's pull request 32104; alone, one after the other, fewer will do.
CLIPS, CLIPS_ALONE = 400, 40
# Seed of the order, so that each run has the same. The number has no meaning.
SEED = 20_261_123
REPEATED_ITEM = 0

Outcomes = dict[tuple[str, str], list[Outcome]]


class Run:
    def __init__(self, sides: Sides, helpers: int, short: bool) -> None:
        self._sides, self._helpers, self._short = sides, helpers, short
        self._questions = count(1)
        # Items that nobody has seen.
        self._items = count(REPEATED_ITEM + 1)
        self._random = random.Random(SEED)

    def rounds(self, rounds: int) -> Iterator[dict[str, object]]:
        outcomes: Outcomes = defaultdict(list)
        for number in range(WARM_UP + rounds):
            print("warming up" if number < WARM_UP else f"round {number} of {rounds}", file=sys.stderr)
            turns = list(self._turns())
            self._random.shuffle(turns)
            for case, side, ask, kind, items in turns:
                if REPEATED_ITEM in items:
                    # Others may have taken its place in caches.
                    ask(kind, [REPEATED_ITEM], self._numbers(1))
                outcome = ask(kind, items, self._numbers(len(items)))
                if number >= WARM_UP:
                    outcomes[case, side].append(outcome)
        for (case, side), of in outcomes.items():
            yield from results(case, side, of)

    def _turns(self) -> Iterator[tuple[str, str, Ask, str, list[int]]]:
        for kind in NEW:
            for side, ask in self._sides.frontends.items():
                ours, theirs = REPEATED[kind]
                yield f"repeated {kind}", side, ask, kind, [REPEATED_ITEM] * (ours if side == "chiasm" else theirs)
                yield f"new {kind}", side, ask, kind, self._new(NEW[kind])
            made = MADE[kind] * self._helpers
            yield f"many {kind}s", "helpers", self._helped, kind, self._new(made)
            yield f"many {kind}s", "alone", self._sides.alone, kind, self._new(MADE[kind])
            yield f"many {kind}s", "item", self._sides.item, kind, self._new(MADE[kind])

    def _helped(self, kind: str, items: list[int], questions: list[int]) -> Outcome:
        # So many that no helper waits for the next one.
        return self._sides.serve(kind, items, questions, clients=2 * self._helpers + 1)

    def compare(self) -> Iterator[dict[str, object]]:
        """The same requests to all frontends, and the same items to those that make them alone."""
        makers = {"alone": self._sides.alone, "item": self._sides.item}
        for kind in NEW:
            questions = self._numbers(COMPARED)
            items = self._new(COMPARED)
            said = {side: ask(kind, items, questions).said for side, ask in self._sides.frontends.items()}
            said |= {side: ask(kind, items, questions).said for side, ask in makers.items()}
            yield value(kind, "chiasm", "prompt tokens", median(said["chiasm"]))
            for side, reference in (*((side, "chiasm") for side in self._sides.frontends if side != "chiasm"), ("alone", "item")):
                different = sum(a != b for a, b in zip(said[side], said[reference], strict=True))
                yield value(kind, side, "compared", COMPARED)
                yield value(kind, side, "different", different)

    def clips(self) -> Iterator[dict[str, object]]:
        clips, alone = (40, 8) if self._short else (CLIPS, CLIPS_ALONE)
        print(f"{clips} clips at once", file=sys.stderr)
        case = "clips"
        helped = self._sides.serve("clip", self._new(clips), self._numbers(clips), clients=clips)
        yield value(case, "helpers", "clips", clips)
        yield value(case, "helpers", "prompt tokens", median(helped.said))
        yield from results(case, "helpers", [helped])
        yield from results(case, "alone", [self._sides.alone("clip", self._new(alone), self._numbers(alone))])

    def _new(self, number: int) -> list[int]:
        return [next(self._items) for _ in range(number)]

    def _numbers(self, number: int) -> list[int]:
        return [next(self._questions) for _ in range(number)]


def results(case: str, side: str, outcomes: list[Outcome]) -> Iterator[dict[str, object]]:
    """Medians over the rounds; times of single requests and items are medians of all rounds together."""
    cpu = [outcome.cpu / len(outcome.times) for outcome in outcomes if outcome.cpu is not None]
    if cpu:
        yield value(case, side, "CPU", median(cpu) * 1e3)
    yield value(case, side, "rate", median(len(outcome.times) / outcome.wall for outcome in outcomes))
    yield value(case, side, "time", median(time for outcome in outcomes for time in outcome.times))


def value(case: str, side: str, metric: str, number: float) -> dict[str, object]:
    return {"case": case, "side": side, "metric": metric, "value": number}


def measure(arguments: argparse.Namespace, scratch: Path) -> None:
    files, model = scratch / "media", scratch / "model"
    files.mkdir()
    media.make(files)
    copy_of_model(Path(arguments.model), model)
    helpers = max(cores() - 1, 1)
    sizes = {kind: (files / kind).stat().st_size for kind in media.KINDS}
    say({"vllm": vllm.__version__, "av": av.__version__, "helpers": helpers, "bytes": sizes})
    with started(arguments.chiasm, arguments.vllm, arguments.item, model, files, scratch, helpers, CLIPS) as sides:
        run = Run(sides, helpers, arguments.short)
        for results in (run.compare(), run.rounds(arguments.rounds), run.clips()):
            for result in results:
                say(result)


def say(result: object) -> None:
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("chiasm", "vllm", "item", "model"):
        parser.add_argument(f"--{flag}", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--short", action="store_true")
    with tempfile.TemporaryDirectory(prefix="chiasm-bench-processor-") as scratch:
        measure(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    main()
