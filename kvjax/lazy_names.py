"""Names of a package that are imported when one is used, because they import JAX, which takes seconds."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package whose names are in its module `names`.

    Returns:
        A function that imports a module of the package, or all names, and one that lists the names.
    """

    def get(name: str) -> Any:
        """Returns a module or a name of the package."""
        namespace = vars(sys.modules[package])
        if name == "__all__" or not name.startswith("_"):
            if importlib.util.find_spec(f"{package}.{name}") is not None:
                return importlib.import_module(f"{package}.{name}")
            names = vars(importlib.import_module(f"{package}.names"))
            public = {key: value for key, value in names.items() if not key.startswith("_")}
            namespace.update(public, __all__=list(public))
        if name not in namespace:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return namespace[name]

    def list_names() -> list[str]:
        """Returns the names of the package."""
        return sorted({*vars(sys.modules[package]), *vars(importlib.import_module(f"{package}.names"))})

    return get, list_names
