"""Finds definitions in a package's sources and says what of them matters, without importing anything."""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Arguments that describe fields and flags.
FOR_PEOPLE = ("description", "help", "title", "examples")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A definition: all nodes that have its name, as properties and their setters do, and where it is."""

    nodes: list[ast.stmt]
    path: str


class Package:
    """vLLM's sources."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "vllm"
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, path: str) -> ast.Module | None:
        """None if there is no such file, or none that this Python understands."""
        if path not in self._modules:
            try:
                self._modules[path] = ast.parse((self._root / path).read_bytes())
            except (OSError, SyntaxError, ValueError):
                self._modules[path] = None
        return self._modules[path]

    def find(self, path: str, name: str, former: str | None = None) -> Found | None:
        """The definition of ``name`` or ``Class.name``: in the module at ``path``, else in the only other one that has it, else
        under the name that it had before."""
        return self._find(path, name) or (self._find(path, former) if former else None)

    def _find(self, path: str, name: str) -> Found | None:
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
        return Found(nodes, path) if nodes else None

    @cached_property
    def _defining(self) -> dict[str, list[str]]:
        """The modules that define each name at their top. Read as text, which is much faster than parsing."""
        start = re.compile(rb"^(?:(?:async +def|def|class) +(\w+)|(\w+)(?: *:[^=]{1,120}?)? *=[^=])", re.MULTILINE)
        defining: dict[str, list[str]] = {}
        for file in sorted(self._root.rglob("*.py")):
            path = file.relative_to(self._root).as_posix()
            for name in {match[0] or match[1] for match in start.findall(file.read_bytes())}:
                defining.setdefault(name.decode(), []).append(path)
        return defining

    def paths(self, pattern: str) -> Iterator[str]:
        for file in sorted(self._root.glob(pattern)):
            yield file.relative_to(self._root).as_posix()


def definitions(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Functions, classes and constants by name, also those under ``if`` and ``try``; overloads are left out, as they only say
    what types there are."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            if not any(plain(decorator) == "overload" for decorator in statement.decorator_list):
                found.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] = [statement]
        elif isinstance(statement, ast.If | ast.Try):
            handlers = [part for handler in getattr(statement, "handlers", []) for part in handler.body]
            for name, nodes in definitions(statement.body + handlers + statement.orelse).items():
                found[name] = nodes
    return found


def plain(node: ast.AST) -> str:
    """The source in one line, formatted by Python, without the texts that only people read."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            call.keywords = [keyword for keyword in call.keywords if keyword.arg not in FOR_PEOPLE]
    return " ".join(ast.unparse(node).split())


def short(text: str) -> str:
    """Long texts by their beginning and their digest."""
    return text if len(text) <= 160 else f"{text[:100]}… {digest_of(text)}"


def signature(node: Function) -> str:
    decorators = "".join(f"@{plain(decorator)} " for decorator in node.decorator_list)
    returns = f" -> {plain(node.returns)}" if node.returns else ""
    asynchronous = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{decorators}{asynchronous}({plain(node.args)}){returns}"


def digest(nodes: list[ast.stmt]) -> str:
    """12 digits that stand for what functions do."""
    return digest_of("".join(dump(node.body) for node in nodes))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]


def does_nothing(statement: ast.stmt) -> bool:
    """Docstrings, other strings that stand alone, and what is logged."""
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str)
    call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.value
    return isinstance(call, ast.Name) and call.id == "logger"


def dump(node: object) -> str:
    """Everything of a syntax tree that has an effect. ``ast.dump`` writes other things in other versions of Python."""
    if isinstance(node, list):
        return "[" + ",".join(dump(item) for item in node if not isinstance(item, ast.stmt) or not does_nothing(item)) + "]"
    if isinstance(node, ast.Constant):
        return f"Constant({node.value!r})"
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields if name not in ("ctx", "type_comment"))
        written = (f"{name}={dump(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({','.join(written)})"
    return repr(node)


class _WithoutWords(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not does_nothing(statement)] or [ast.Pass()]
        return node


def code_lines(nodes: list[ast.stmt]) -> list[str]:
    """The source as Python formats it, without comments, docstrings and what is logged: what a digest stands for."""
    return [line for node in nodes for line in ast.unparse(_WithoutWords().visit(node)).splitlines()]
