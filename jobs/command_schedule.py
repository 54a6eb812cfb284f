"""`batchgen schedule` between the command line and the texts: what is printed, where units go, what to do next.

Knows the terminal and the user's unit directory; the texts are made in schedule.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from .errors import UsageError
from .job import Job
from .schedule import Schedule, crontab_line, install_units, make_schedule, systemd_units


def schedule_job(
    job: Job,
    at: str,
    deadline: str | None = None,
    assignments: tuple[str, ...] = (),
    form: str = "systemd",
    install: bool = False,
) -> Iterator[str]:
    """Lines that say how the job runs every night; with `install` the systemd units are written first."""
    schedule = make_schedule(job, at, deadline, assignments)
    if form == "cron":
        if install:
            raise UsageError("--install: writes systemd units; a crontab is yours, add the line with `crontab -e`")
        yield crontab_line(schedule)
    elif install:
        yield from _install(schedule)
    else:
        for name, text in systemd_units(schedule).items():
            yield f"# {name}\n{text}"


def _install(schedule: Schedule) -> Iterator[str]:
    for path in install_units(schedule, user_unit_directory()):
        yield f"wrote {path}"
    if schedule.environment_file is not None:
        yield f"the job reads environment variables: put NAME=value lines into {schedule.environment_file}"
    yield f"start it: systemctl --user daemon-reload && systemctl --user enable --now {schedule.unit}.timer"
    yield "let it run while you are logged out: loginctl enable-linger"


def user_unit_directory() -> Path:
    """Where systemd looks for a user's own units."""
    configured = os.environ.get("XDG_CONFIG_HOME")
    return (Path(configured) if configured else Path.home() / ".config") / "systemd" / "user"
