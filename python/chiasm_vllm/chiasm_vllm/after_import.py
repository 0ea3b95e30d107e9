"""Runs a callback when a module is imported, without importing the module.

vLLM loads plugins in every process: engines, workers, the API server, and short-lived processes
that only inspect a model's class. Importing the engine core takes seconds, and most of these
processes never import it.
"""

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls ``callback`` with the module ``name``: now if it is imported, else after its import.

    Has no effect if the same callback already waits for the same module. ``callback`` must not
    raise, because the import would fail.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    finders = (finder for finder in sys.meta_path if isinstance(finder, _CallbackFinder))
    if not any(finder.waits_for(name, callback) for finder in finders):
        sys.meta_path.insert(0, _CallbackFinder(name, callback))


class _CallbackFinder(importlib.abc.MetaPathFinder):
    """A finder for one module: finds it as the other finders do, and extends its loader."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback

    def waits_for(self, name: str, callback: Callable[[ModuleType], None]) -> bool:
        return self._name == name and self._callback == callback

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
                self._wrap_loader(spec)
                return spec
        return None

    def _wrap_loader(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        exec_module = loader.exec_module

        def exec_module_with_callback(module: ModuleType) -> None:
            exec_module(module)
            # Only now, because a failed import can be repeated and needs this finder again.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._callback(module)

        # Replaces the method of this loader only: every module has a loader of its own.
        loader.exec_module = exec_module_with_callback
