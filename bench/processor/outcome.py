"""What asking a side some times comes to."""

from typing import NamedTuple


class Outcome(NamedTuple):
    # Milliseconds of each.
    times: list[float]
    # Seconds of all; no CPU time where that is not asked for.
    wall: float
    cpu: float | None
    # What was found of each: the prompt's tokens, or the sum of the tensors' bytes.
    said: list[int]
