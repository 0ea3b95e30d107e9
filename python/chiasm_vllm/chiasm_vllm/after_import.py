"""Runs a function on a module as soon as that is imported, without importing it.

vLLM loads plugins in every process: engines, workers, the API server, short-lived ones that only look at a model's
class. Importing the engine core takes seconds, and most of them never do.
"""

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls ``then`` with the module ``name``: now if it is imported already, else right after it is.

    Without effect if the same is already waited for. ``then`` must not raise: the import would fail.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    elif not any(isinstance(finder, _Finder) and finder.waits_for(name, then) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds its one module as the other finders do, with a loader that has one thing more to do."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def waits_for(self, name: str, then: Callable[[ModuleType], None]) -> bool:
        return self._name == name and self._then == then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._extend(spec)
                return spec
        return None

    def _extend(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        exec_module = loader.exec_module

        def exec_module_then(module: ModuleType) -> None:
            exec_module(module)
            # An import that failed before this line can be tried again, so only now there is nothing to wait for.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._then(module)

        # On this loader alone, not on its class: every module gets a loader of its own.
        loader.exec_module = exec_module_then
