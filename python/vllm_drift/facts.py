#!/usr/bin/env python3
"""Reads out of vLLM's sources what Chiasm relies on.

usage: facts.py PACKAGES [REPORT]

PACKAGES is a folder with ``vllm/`` in it, REPORT what ``pip install --report`` wrote about the wheel. Prints JSON: a list of groups
as in ``relied_on.py``, each with its facts by name. Nothing of vLLM is imported. What is not found is the fact ``missing``.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from kinds import Code, EveryFlag, Fields, Flags, Group, Keys, Kind, Named, Requirements, Values, Variables
from relied_on import GROUPS
from source import FOR_PEOPLE, Found, Function, Package, definitions, digest, plain, short, signature

MISSING = "missing"
# The files that add the flags of ``vllm serve``, and of no other command.
SERVE_PARSERS = ("engine/arg_utils.py", "entrypoints/**/cli_args.py", "entrypoints/cli_args.py")

Fact = tuple[str, str]

# Where vllm serve's flags are added.
PARSERS = ("engine/arg_utils.py", "entrypoints/**/cli_args.py", "entrypoints/cli/*.py", "utils/argparse_utils.py")


def facts_of(package: Package, requirements: list[str], kind: Kind) -> Iterator[Fact]:
    match kind:
        case Code():
            yield from _each(package, kind, _code)
        case Values():
            yield from _each(package, kind, _value)
        case Fields():
            yield from _each(package, kind, _fields)
        case Keys():
            yield from _keys(package, kind)
        case Variables():
            yield from _variables(package, kind)
        case Flags():
            yield from _flags(package, kind)
        case EveryFlag():
            yield from _every_flag(package)
        case Requirements():
            yield from _requirements(requirements, kind)


def _each(package: Package, kind: Named, read) -> Iterator[Fact]:
    for name in kind.names:
        found = package.find(kind.path, name.removesuffix(".*"), kind.former.get(name))
        if found is None:
            yield f"{kind.path}:{name}", MISSING
            continue
        moved = "" if found.path == kind.path else f" (in {found.path})"
        for fact, value in read(found, name):
            yield f"{kind.path}:{fact}", value + moved


def _code(found: Found, name: str) -> Iterator[Fact]:
    first = found.nodes[0]
    if isinstance(first, Function):
        yield name, f"{signature(first)} #{digest(found.nodes)}"
    elif isinstance(first, ast.ClassDef):
        own = name.removesuffix(".*")
        yield own, _head(first)
        if name == own:
            return
        for part, nodes in definitions(first.body).items():
            inner = Found(nodes, found.path)
            if isinstance(nodes[0], Function):
                yield from _code(inner, f"{own}.{part}")
            elif not isinstance(nodes[0], ast.ClassDef):
                yield from _value(inner, f"{own}.{part}")
    else:
        yield from _value(found, name)


def _head(node: ast.ClassDef) -> str:
    decorators = "".join(f"@{plain(decorator)} " for decorator in node.decorator_list)
    bases = ", ".join(plain(base) for base in [*node.bases, *node.keywords])
    return f"{decorators}class({bases})"


def _value(found: Found, name: str) -> Iterator[Fact]:
    yield name, _assigned(found.nodes[-1])


def _assigned(node: ast.stmt) -> str:
    """What a name is annotated with and set to."""
    annotation = plain(node.annotation) if isinstance(node, ast.AnnAssign) else ""
    value = plain(node.value) if getattr(node, "value", None) is not None else ""
    return short(" = ".join(part for part in (annotation, value) if part))


def _fields(found: Found, name: str) -> Iterator[Fact]:
    node = found.nodes[0]
    if not isinstance(node, ast.ClassDef):
        yield name, _assigned(node)
        return
    head = _head(node)
    yield name, head
    # By position travel structs that say so, and named tuples.
    by_position = "array_like=True" in head or "NamedTuple" in head or "EventBatch" in head
    position = 0
    for part, nodes in definitions(node.body).items():
        if isinstance(nodes[0], ast.Assign | ast.AnnAssign):
            yield f"{name}.{part}", f"[{position}] {_assigned(nodes[0])}" if by_position else _assigned(nodes[0])
            position += 1


def _dictionary(package: Package, path: str, name: str) -> dict[str, ast.expr] | None:
    found = package.find(path, name)
    value = getattr(found.nodes[-1], "value", None) if found else None
    if not isinstance(value, ast.Dict):
        return None
    return {key.value: entry for key, entry in zip(value.keys, value.values) if isinstance(key, ast.Constant)}


def _keys(package: Package, kind: Keys) -> Iterator[Fact]:
    entries = _dictionary(package, kind.path, kind.dictionary)
    if entries is None:
        yield f"{kind.path}:{kind.dictionary}", MISSING
        return
    for key in kind.keys or sorted(entries):
        yield f"{kind.path}:{kind.dictionary}[{key}]", short(plain(entries[key])) if key in entries else MISSING


def _variables(package: Package, kind: Variables) -> Iterator[Fact]:
    readers = _dictionary(package, "envs.py", "environment_variables") or {}
    for name in kind.names:
        found = package.find("envs.py", name)
        declared = _assigned(found.nodes[-1]) if found else MISSING
        yield f"envs.py:{name}", f"{declared}; {short(plain(readers[name]))}" if name in readers else declared


def _flags(package: Package, kind: Flags) -> Iterator[Fact]:
    added: dict[str, str] = {}
    for path in dict.fromkeys(path for pattern in PARSERS for path in package.paths(pattern)):
        module = package.module(path)
        for node in ast.walk(module) if module else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"):
                continue
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            rest = (plain(keyword) for keyword in node.keywords if keyword.arg not in FOR_PEOPLE)
            for name in names:
                added.setdefault(name, short(", ".join([*names, *rest])))
    for name in kind.names:
        yield name, added.get(name, MISSING)


def _every_flag(package: Package) -> Iterator[Fact]:
    names: set[str] = set()
    for path in dict.fromkeys(path for pattern in SERVE_PARSERS for path in package.paths(pattern)):
        module = package.module(path)
        for node in ast.walk(module) if module else ():
            match node:
                case ast.Call(func=ast.Attribute(attr="add_argument"), args=arguments):
                    literals = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
                    names.update(name for name in literals if isinstance(name, str) and name.startswith("-"))
                case ast.ClassDef(name=name, body=body) if name.endswith("FrontendArgs"):
                    fields = [field.target.id for field in body if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)]
                    names.update(f"--{field.replace('_', '-')}" for field in fields)
    if not names:
        yield "every flag", MISSING
    for name in sorted(names):
        yield f"every flag: {name}", "there"


def _requirements(requirements: list[str], kind: Requirements) -> Iterator[Fact]:
    for package in kind.packages:
        # The name ends where a version, an extra or a marker begins.
        same = [line for line in requirements if re.match(rf"{re.escape(package)}(?![\w.-])", line, re.IGNORECASE)]
        yield package, " | ".join(same) or MISSING


def read_requirements(packages: Path, report: Path | None) -> list[str]:
    """From pip's report, else from the metadata beside the package."""
    if report is not None:
        return json.loads(report.read_text())["install"][0]["metadata"].get("requires_dist", [])
    prefix = "Requires-Dist: "
    for metadata in sorted(packages.glob("vllm*.dist-info/METADATA")):
        lines = metadata.read_text(errors="replace").splitlines()
        if requirements := [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]:
            return requirements
    return []


def read(package: Package, requirements: list[str], groups: tuple[Group, ...] = GROUPS) -> list[dict[str, object]]:
    return [
        {
            "name": group.name,
            "what": group.what,
            "ours": list(group.ours),
            "facts": dict(fact for kind in group.relied_on for fact in facts_of(package, requirements, kind)),
        }
        for group in groups
    ]


def main() -> None:
    packages, report = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None
    json.dump(read(Package(packages), read_requirements(packages, report)), sys.stdout, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
