"""The packages of a plain checkout under the name `batchgen`, where nothing is installed and packages may be missing.

For scripts on machines without a network: what they do not use of pydantic and llguidance is stood in for, by names
that hold their place. A grammar or a job file cannot be read then.
"""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def use_checkout() -> None:
    """Makes `import batchgen` work; an installed one is left as it is."""
    if not _installed():
        package = ModuleType("batchgen")
        package.__path__ = [str(ROOT)]
        sys.modules["batchgen"] = package
    for name, make in {"pydantic": _pydantic, "llguidance": _llguidance}.items():
        if not _importable(name):
            sys.modules[name] = make()


def _installed() -> bool:
    try:
        return find_spec("batchgen.engine") is not None
    except ModuleNotFoundError:
        return False


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


class _Model:
    """Fields with their defaults; nothing is checked."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __init_subclass__(cls, **options: Any) -> None:
        return None

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> Any:
        return cls(**values)

    def model_copy(self, update: dict[str, Any]) -> Any:
        return type(self)(**{**vars(self), **update})


def _pydantic() -> ModuleType:
    def field(default: Any = None, **description: Any) -> Any:
        return description["default_factory"]() if "default_factory" in description else default

    def unchanged(*names: str, **options: Any) -> Any:
        return lambda function: function

    module = ModuleType("pydantic")
    vars(module).update(
        BaseModel=_Model, ConfigDict=dict, Field=field, ValidationInfo=SimpleNamespace, ValidationError=ValueError
    )
    vars(module).update(field_validator=unchanged, model_validator=unchanged)
    return module


def _llguidance() -> ModuleType:
    module = ModuleType("llguidance")
    for name in ("LLExecutor", "LLMatcher", "LLParserLimits", "LLTokenizer"):
        setattr(module, name, SimpleNamespace)
    return module
