#!/usr/bin/env python3
"""Says how the code of functions differs between two versions of vLLM.

usage: differences.py OLD_PACKAGES NEW_PACKAGES NAME...

Each NAME is a fact's, ``PATH:FUNCTION``. Prints for each a diff of what its digest stands for, not more than some lines of it.
"""

import difflib
import sys
from pathlib import Path

from kinds import Named
from relied_on import GROUPS
from source import Function, Package, code_lines

MOST_LINES = 60

# What things were called before, by what they are called now.
FORMER = {
    (kind.path, name.removesuffix(".*")): old
    for group in GROUPS
    for kind in group.relied_on
    if isinstance(kind, Named)
    for name, old in kind.former.items()
}


def difference(old: Package, new: Package, name: str) -> list[str]:
    path, _, qualified = name.partition(":")
    own, dot, method = qualified.partition(".")
    former = FORMER.get((path, qualified)) or (path, own) in FORMER and f"{FORMER[path, own]}{dot}{method}"
    sides = []
    for package in (old, new):
        found = package.find(path, qualified, former or None)
        functions = found is not None and all(isinstance(node, Function) for node in found.nodes)
        sides.append(code_lines(found.nodes) if functions else [])
    if not all(sides):
        return []
    lines = list(difflib.unified_diff(*sides, lineterm="", n=2))[2:]
    left = len(lines) - MOST_LINES
    return lines[:MOST_LINES] + ([f"… and {left} lines more"] if left > 0 else [])


def main() -> None:
    old, new = (Package(Path(folder)) for folder in sys.argv[1:3])
    for name in sys.argv[3:]:
        if lines := difference(old, new, name):
            print(f"--- {name}")
            print("\n".join(lines))


if __name__ == "__main__":
    main()
