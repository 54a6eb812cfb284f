"""Names that are safe wherever a job's name has to stand: units, files, labels.

Knows characters only.
"""

import re

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def plain_name(name: str) -> str:
    """The name with runs of anything but letters, digits, dot, dash and underscore replaced by a dash."""
    return _UNSAFE.sub("-", name).strip("-.") or "job"
