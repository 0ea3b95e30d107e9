#!/usr/bin/env python3
"""Reads the facts that Chiasm relies on from vLLM's sources.

usage: facts.py PACKAGES [REPORT]

PACKAGES is a folder that contains ``vllm/``. REPORT is the output of ``pip install --report`` for
the wheel. Prints JSON: a list of the groups of ``relied_on.py``, each with its facts by name.
Nothing of vLLM is imported. A definition that is not found becomes the fact ``missing``.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from kinds import (
    Code,
    AllFlags,
    Fields,
    Flags,
    Group,
    Keys,
    Kind,
    Named,
    Requirements,
    Values,
    Variables,
)
from relied_on import GROUPS
from source import (
    DESCRIPTIVE_ARGUMENTS,
    Definition,
    Function,
    Package,
    definitions,
    digest_of_functions,
    one_line_source,
    shorten,
    signature,
)

MISSING = "missing"
# The files that add the flags of ``vllm serve``, and of no other command.
SERVE_PARSER_FILES = (
    "engine/arg_utils.py",
    "entrypoints/**/cli_args.py",
    "entrypoints/cli_args.py",
)

Fact = tuple[str, str]

# The files that add the flags of ``vllm serve``, among others.
PARSER_FILES = (
    "engine/arg_utils.py",
    "entrypoints/**/cli_args.py",
    "entrypoints/cli/*.py",
    "utils/argparse_utils.py",
)


def read_kind(package: Package, requirements: list[str], kind: Kind) -> Iterator[Fact]:
    match kind:
        case Code():
            yield from _read_named(package, kind, _code)
        case Values():
            yield from _read_named(package, kind, _value)
        case Fields():
            yield from _read_named(package, kind, _fields)
        case Keys():
            yield from _keys(package, kind)
        case Variables():
            yield from _variables(package, kind)
        case Flags():
            yield from _flags(package, kind)
        case AllFlags():
            yield from _all_flags(package)
        case Requirements():
            yield from _requirements(requirements, kind)


def _read_named(package: Package, kind: Named, read) -> Iterator[Fact]:
    for name in kind.names:
        found = package.find(kind.path, name.removesuffix(".*"), kind.former.get(name))
        if found is None:
            yield f"{kind.path}:{name}", MISSING
            continue
        moved = "" if found.path == kind.path else f" (in {found.path})"
        for fact, value in read(found, name):
            yield f"{kind.path}:{fact}", value + moved


def _code(found: Definition, name: str) -> Iterator[Fact]:
    first = found.nodes[0]
    if isinstance(first, Function):
        yield name, f"{signature(first)} #{digest_of_functions(found.nodes)}"
    elif isinstance(first, ast.ClassDef):
        own = name.removesuffix(".*")
        yield own, _class_header(first)
        if name == own:
            return
        for part, nodes in definitions(first.body).items():
            inner = Definition(nodes, found.path)
            if isinstance(nodes[0], Function):
                yield from _code(inner, f"{own}.{part}")
            elif not isinstance(nodes[0], ast.ClassDef):
                yield from _value(inner, f"{own}.{part}")
    else:
        yield from _value(found, name)


def _class_header(node: ast.ClassDef) -> str:
    decorators = "".join(f"@{one_line_source(decorator)} " for decorator in node.decorator_list)
    bases = ", ".join(one_line_source(base) for base in [*node.bases, *node.keywords])
    return f"{decorators}class({bases})"


def _value(found: Definition, name: str) -> Iterator[Fact]:
    yield name, _assignment(found.nodes[-1])


def _assignment(node: ast.stmt) -> str:
    """Returns the annotation and the value of a name."""
    annotation = one_line_source(node.annotation) if isinstance(node, ast.AnnAssign) else ""
    value = one_line_source(node.value) if getattr(node, "value", None) is not None else ""
    return shorten(" = ".join(part for part in (annotation, value) if part))


def _fields(found: Definition, name: str) -> Iterator[Fact]:
    node = found.nodes[0]
    if not isinstance(node, ast.ClassDef):
        yield name, _assignment(node)
        return
    head = _class_header(node)
    yield name, head
    # Structs with this option and named tuples are encoded by position.
    by_position = "array_like=True" in head or "NamedTuple" in head or "EventBatch" in head
    position = 0
    for part, nodes in definitions(node.body).items():
        if isinstance(nodes[0], ast.Assign | ast.AnnAssign):
            yield (
                f"{name}.{part}",
                f"[{position}] {_assignment(nodes[0])}" if by_position else _assignment(nodes[0]),
            )
            position += 1


def _find_dictionary(package: Package, path: str, name: str) -> dict[str, ast.expr] | None:
    found = package.find(path, name)
    value = getattr(found.nodes[-1], "value", None) if found else None
    if not isinstance(value, ast.Dict):
        return None
    return {
        key.value: entry
        for key, entry in zip(value.keys, value.values)
        if isinstance(key, ast.Constant)
    }


def _keys(package: Package, kind: Keys) -> Iterator[Fact]:
    entries = _find_dictionary(package, kind.path, kind.dictionary)
    if entries is None:
        yield f"{kind.path}:{kind.dictionary}", MISSING
        return
    for key in kind.keys or sorted(entries):
        yield (
            f"{kind.path}:{kind.dictionary}[{key}]",
            shorten(one_line_source(entries[key])) if key in entries else MISSING,
        )


def _variables(package: Package, kind: Variables) -> Iterator[Fact]:
    readers = _find_dictionary(package, "envs.py", "environment_variables") or {}
    for name in kind.names:
        found = package.find("envs.py", name)
        declared = _assignment(found.nodes[-1]) if found else MISSING
        yield (
            f"envs.py:{name}",
            f"{declared}; {shorten(one_line_source(readers[name]))}"
            if name in readers
            else declared,
        )


def _flags(package: Package, kind: Flags) -> Iterator[Fact]:
    added: dict[str, str] = {}
    for path in dict.fromkeys(path for pattern in PARSER_FILES for path in package.paths(pattern)):
        module = package.module(path)
        for node in ast.walk(module) if module else ():
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                continue
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            rest = (
                one_line_source(keyword)
                for keyword in node.keywords
                if keyword.arg not in DESCRIPTIVE_ARGUMENTS
            )
            for name in names:
                added.setdefault(name, shorten(", ".join([*names, *rest])))
    for name in kind.names:
        yield name, added.get(name, MISSING)


def _all_flags(package: Package) -> Iterator[Fact]:
    names: set[str] = set()
    for path in dict.fromkeys(
        path for pattern in SERVE_PARSER_FILES for path in package.paths(pattern)
    ):
        module = package.module(path)
        for node in ast.walk(module) if module else ():
            match node:
                case ast.Call(func=ast.Attribute(attr="add_argument"), args=arguments):
                    literals = [
                        argument.value
                        for argument in arguments
                        if isinstance(argument, ast.Constant)
                    ]
                    names.update(
                        name for name in literals if isinstance(name, str) and name.startswith("-")
                    )
                case ast.ClassDef(name=name, body=body) if name.endswith("FrontendArgs"):
                    fields = [
                        field.target.id
                        for field in body
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                    ]
                    names.update(f"--{field.replace('_', '-')}" for field in fields)
    if not names:
        yield "every flag", MISSING
    for name in sorted(names):
        yield f"every flag: {name}", "there"


def _requirements(requirements: list[str], kind: Requirements) -> Iterator[Fact]:
    for package in kind.packages:
        # The name ends in front of a version, an extra or a marker.
        same = [
            line
            for line in requirements
            if re.match(rf"{re.escape(package)}(?![\w.-])", line, re.IGNORECASE)
        ]
        yield package, " | ".join(same) or MISSING


def read_requirements(packages: Path, report: Path | None) -> list[str]:
    """Reads the requirements from pip's report, or else from the metadata beside the package."""
    if report is not None:
        return json.loads(report.read_text())["install"][0]["metadata"].get("requires_dist", [])
    prefix = "Requires-Dist: "
    for metadata in sorted(packages.glob("vllm*.dist-info/METADATA")):
        lines = metadata.read_text(errors="replace").splitlines()
        if requirements := [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]:
            return requirements
    return []


def read(
    package: Package, requirements: list[str], groups: tuple[Group, ...] = GROUPS
) -> list[dict[str, object]]:
    return [
        {
            "name": group.name,
            "what": group.reason,
            "ours": list(group.our_files),
            "facts": dict(
                fact for kind in group.relied_on for fact in read_kind(package, requirements, kind)
            ),
        }
        for group in groups
    ]


def main() -> None:
    packages = Path(sys.argv[1])
    report = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    json.dump(
        read(Package(packages), read_requirements(packages, report)),
        sys.stdout,
        indent=1,
        ensure_ascii=False,
    )


if __name__ == "__main__":
    main()
