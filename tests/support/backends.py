"""Every table of CPU ops this machine can run: the reference, and the native kernels by instruction set."""

import pytest

from batchgen.kernels import Kernels
from batchgen.kernels.native.library import SETS, available
from batchgen.kernels.tables import NativeKernels, ReferenceKernels

REFERENCE = ReferenceKernels()
NATIVE: dict[str, Kernels] = {f"native-{name}": NativeKernels(name) for name in available()}
BACKENDS: dict[str, Kernels] = {"reference": REFERENCE, **NATIVE}
ABSENT = [f"native-{name}" for name in SETS if name not in available()]

_PARAMETERS = [
    *(pytest.param(kernels, id=name) for name, kernels in BACKENDS.items()),
    *(pytest.param(None, id=name, marks=pytest.mark.skip("not for this processor")) for name in ABSENT),
]
each_backend = pytest.mark.parametrize("kernels", _PARAMETERS)
