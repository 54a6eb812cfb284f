"""Names that are safe wherever a job's name has to stand: units, files, labels; and the sidecar directory's.

Knows characters only.
"""

import re

SIDECAR = "__batchgen__"  # of an output; loaders pass over names that start with two underscores
READ = "read.arrow"  # in the sidecar directory of a step: what its rows read of earlier answers

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def plain_name(name: str) -> str:
    """The name with runs of anything but letters, digits, dot, dash and underscore replaced by a dash."""
    return _UNSAFE.sub("-", name).strip("-.") or "job"
