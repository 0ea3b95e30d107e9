"""Finds definitions in a package's sources and describes them, without importing anything."""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# The arguments that describe fields and flags to people.
DESCRIPTIVE_ARGUMENTS = ("description", "help", "title", "examples")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A definition: its file and all nodes with its name, such as a property and its setter."""

    nodes: list[ast.stmt]
    path: str


class Package:
    """vLLM's sources."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "vllm"
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, path: str) -> ast.Module | None:
        """Returns the file's syntax tree, or None if the file is missing or can't be parsed."""
        if path not in self._modules:
            try:
                self._modules[path] = ast.parse((self._root / path).read_bytes())
            except (OSError, SyntaxError, ValueError):
                self._modules[path] = None
        return self._modules[path]

    def find(self, path: str, name: str, former: str | None = None) -> Definition | None:
        """Returns the definition of ``name`` or ``Class.name``.

        Searches the module at ``path``, then all others if only one of them has the name, and then
        the same for the name ``former``.
        """
        return self._find(path, name) or (self._find(path, former) if former else None)

    def _find(self, path: str, name: str) -> Definition | None:
        top = name.partition(".")[0]
        here = self.module(path)
        if here is None or top not in definitions(here.body):
            others = self._defining.get(top, ())
            if len(others) != 1:
                return None
            path = others[0]
        nodes: list[ast.stmt] = [self.module(path)]
        for part in name.split("."):
            body = [statement for node in nodes for statement in getattr(node, "body", [])]
            nodes = definitions(body).get(part, [])
        return Definition(nodes, path) if nodes else None

    @cached_property
    def _defining(self) -> dict[str, list[str]]:
        """The modules that define each top-level name. Reads text, which is faster than parsing."""
        start = re.compile(
            rb"^(?:(?:async +def|def|class) +(\w+)|(\w+)(?: *:[^=]{1,120}?)? *=[^=])", re.MULTILINE
        )
        defining: dict[str, list[str]] = {}
        for file in sorted(self._root.rglob("*.py")):
            path = file.relative_to(self._root).as_posix()
            for name in {match[0] or match[1] for match in start.findall(file.read_bytes())}:
                defining.setdefault(name.decode(), []).append(path)
        return defining

    def paths(self, pattern: str) -> Iterator[str]:
        """Yields the paths of the files that match a glob pattern."""
        for file in sorted(self._root.glob(pattern)):
            yield file.relative_to(self._root).as_posix()


def definitions(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Returns functions, classes and constants by name, including those under ``if`` and ``try``.

    Overloads are skipped, because they only declare types.
    """
    found: dict[str, list[ast.stmt]] = {}
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            if not any(
                one_line_source(decorator) == "overload" for decorator in statement.decorator_list
            ):
                found.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] = [statement]
        elif isinstance(statement, ast.If | ast.Try):
            handlers = [
                part for handler in getattr(statement, "handlers", []) for part in handler.body
            ]
            for name, nodes in definitions(statement.body + handlers + statement.orelse).items():
                found[name] = nodes
    return found


def one_line_source(node: ast.AST) -> str:
    """Returns the source in one line in Python's format, without descriptions for people."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            call.keywords = [
                keyword for keyword in call.keywords if keyword.arg not in DESCRIPTIVE_ARGUMENTS
            ]
    return " ".join(ast.unparse(node).split())


def shorten(text: str) -> str:
    """Shortens a long text to its beginning and a digest."""
    return text if len(text) <= 160 else f"{text[:100]}… {digest_of_text(text)}"


def signature(node: Function) -> str:
    """Returns the decorators, arguments and return type of a function."""
    decorators = "".join(f"@{one_line_source(decorator)} " for decorator in node.decorator_list)
    returns = f" -> {one_line_source(node.returns)}" if node.returns else ""
    asynchronous = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{decorators}{asynchronous}({one_line_source(node.args)}){returns}"


def digest_of_functions(nodes: list[ast.stmt]) -> str:
    """Returns a digest of 12 digits of the functions' code."""
    return digest_of_text("".join(dump(node.body) for node in nodes))


def digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]


def has_no_effect(statement: ast.stmt) -> bool:
    """Returns True for docstrings, other strings that are statements, and logging."""
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str)
    call = (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.value
    )
    return isinstance(call, ast.Name) and call.id == "logger"


def dump(node: object) -> str:
    """Returns all parts of a syntax tree that have an effect.

    The output of ``ast.dump`` depends on Python's version.
    """
    if isinstance(node, list):
        return (
            "["
            + ",".join(
                dump(item)
                for item in node
                if not isinstance(item, ast.stmt) or not has_no_effect(item)
            )
            + "]"
        )
    if isinstance(node, ast.Constant):
        return f"Constant({node.value!r})"
    if isinstance(node, ast.AST):
        fields = (
            (name, getattr(node, name, None))
            for name in node._fields
            if name not in ("ctx", "type_comment")
        )
        written = (
            f"{name}={dump(value)}" for name, value in fields if value is not None and value != []
        )
        return f"{type(node).__name__}({','.join(written)})"
    return repr(node)


class _DropNoEffect(ast.NodeTransformer):
    """Removes statements without effect."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not has_no_effect(statement)] or [
                ast.Pass()
            ]
        return node


def code_lines(nodes: list[ast.stmt]) -> list[str]:
    """Returns the source that a digest covers, in Python's format.

    It has no comments, docstrings and logging.
    """
    return [
        line for node in nodes for line in ast.unparse(_DropNoEffect().visit(node)).splitlines()
    ]
