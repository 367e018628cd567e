"""Every drafter that a recipe or a saved folder may name: the classes found in this package's files."""

import importlib
import pkgutil

import drafttrain.drafters
from drafttrain.drafters.base import DrafterConfig


def known_drafters() -> dict[str, type[DrafterConfig]]:
    """Class name -> class, after reading all files of the package: a new drafter needs no entry in any list."""
    for module in pkgutil.iter_modules(drafttrain.drafters.__path__):
        importlib.import_module(f"{drafttrain.drafters.__name__}.{module.name}")
    found, waiting = {}, list(DrafterConfig.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if not cls.__name__.startswith("_") and cls.__module__.startswith(drafttrain.drafters.__name__ + "."):
            found[cls.__name__] = cls
    return dict(sorted(found.items()))
