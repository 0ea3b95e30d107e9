#!/usr/bin/env python3
"""Prints the differences in functions between two versions of vLLM.

usage: differences.py OLD_PACKAGES NEW_PACKAGES NAME...

Each NAME is the name of a fact, ``PATH:FUNCTION``. Prints at most MAX_DIFF_LINES lines of a diff of
the code that the fact's digest covers.
"""

import difflib
import sys
from pathlib import Path

from kinds import Named
from relied_on import GROUPS
from source import Function, Package, code_lines

MAX_DIFF_LINES = 60

# The former names of definitions, by path and current name.
FORMER_NAMES = {
    (kind.path, name.removesuffix(".*")): old
    for group in GROUPS
    for kind in group.relied_on
    if isinstance(kind, Named)
    for name, old in kind.former.items()
}


def difference(old: Package, new: Package, name: str) -> list[str]:
    """Returns a diff of a function; empty if it is equal, missing or no function."""
    path, _, qualified = name.partition(":")
    own, dot, method = qualified.partition(".")
    former = (
        FORMER_NAMES.get((path, qualified))
        or (path, own) in FORMER_NAMES
        and f"{FORMER_NAMES[path, own]}{dot}{method}"
    )
    sides = []
    for package in (old, new):
        found = package.find(path, qualified, former or None)
        functions = found is not None and all(isinstance(node, Function) for node in found.nodes)
        sides.append(code_lines(found.nodes) if functions else [])
    if not all(sides):
        return []
    lines = list(difflib.unified_diff(*sides, lineterm="", n=2))[2:]
    left = len(lines) - MAX_DIFF_LINES
    return lines[:MAX_DIFF_LINES] + ([f"… and {left} lines more"] if left > 0 else [])


def main() -> None:
    old, new = (Package(Path(folder)) for folder in sys.argv[1:3])
    for name in sys.argv[3:]:
        if lines := difference(old, new, name):
            print(f"--- {name}")
            print("\n".join(lines))


if __name__ == "__main__":
    main()
