"""The text of a systemd timer with its service, or of a crontab line, that runs a job every night.

Knows the quoting rules of both; neither starts nor enables anything.
"""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from .document import variables_in
from .errors import UsageError
from .job import Job
from .names import plain_name
from .times import parse_clock, parse_deadline

_STOP_SECONDS = 180  # for the last step, the journal and the manifest


@dataclass(frozen=True)
class Schedule:
    """When a job runs. `at`: HH:MM; `deadline`: as `run --deadline` takes it; `assignments`: KEY=VALUE of `--set`."""

    job: Job
    at: str
    deadline: str | None = None
    assignments: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """Name of the systemd units, without their suffix."""
        return f"batchgen-{plain_name(self.job.name)}"

    @property
    def command(self) -> list[str]:
        """The command that the timer gives, in absolute paths."""
        job = Path(self.job.source).resolve()
        assignments = [word for text in self.assignments for word in ("--set", text)]
        deadline = ["--deadline", self.deadline] if self.deadline else []
        return [str(_program()), "run", str(job), *assignments, *deadline]

    @property
    def environment_file(self) -> Path | None:
        """Where the service looks for the environment variables that the job names; None when it names none."""
        return self.job.base / f"{Path(self.job.source).stem}.env" if variables_in(self.job.document) else None


def make_schedule(job: Job, at: str, deadline: str | None, assignments: tuple[str, ...]) -> Schedule:
    """Raises UsageError for a time that is none, and for a deadline at the very time of the start."""
    try:
        hour, minute = parse_clock(at)
    except ValueError as error:
        raise UsageError(f"--at: {error}") from error
    clock = f"{hour:02}:{minute:02}"
    if deadline is not None:
        try:
            parse_deadline(deadline)
        except ValueError as error:
            raise UsageError(f"--deadline: {error}") from error
        if ":" in deadline and parse_clock(deadline) == (hour, minute):
            raise UsageError(f"--deadline: {deadline} is the time of the start; a run would have a whole day")
    schedule = Schedule(job, clock, deadline, assignments)
    for word in [*schedule.command, str(job.base)]:
        if not word.isprintable():
            raise UsageError(f"{word!r}: holds a character that a unit or a crontab cannot hold; rename it")
    if str(job.base).endswith(("\\", " ")):
        raise UsageError(f"{str(job.base)!r}: ends in a character that a unit cannot hold there; rename it")
    return schedule


def systemd_units(schedule: Schedule) -> dict[str, str]:
    """File name -> content of the service and its timer."""
    return {
        f"{schedule.unit}.service": _service(schedule),
        f"{schedule.unit}.timer": _timer(schedule),
    }


def _service(schedule: Schedule) -> str:
    """A night that the deadline ends (4), or that finds another run at work (75), is no failed unit."""
    variables = sorted(variables_in(schedule.job.document))
    environment = ""
    if schedule.environment_file is not None:
        environment = (
            f"# NAME=value lines for {', '.join(variables)}\n"
            f"EnvironmentFile={_no_specifiers(_no_pattern(str(schedule.environment_file)))}\n"
        )
    return (
        "[Unit]\n"
        f"Description=batchgen job {_no_specifiers(plain_name(schedule.job.name))}\n"
        "\n"
        "[Service]\n"
        "Type=oneshot\n"
        f"WorkingDirectory={_no_specifiers(str(schedule.job.base))}\n"
        f"{environment}"
        f"ExecStart={' '.join(_systemd_word(word) for word in schedule.command)}\n"
        "SuccessExitStatus=4 75\n"
        "KillMode=mixed\n"
        f"TimeoutStopSec={_STOP_SECONDS}\n"
    )


def _timer(schedule: Schedule) -> str:
    """A start that was missed is made up for, but not by a run that would then last until the next day's deadline."""
    return (
        "[Unit]\n"
        f"Description=batchgen job {_no_specifiers(plain_name(schedule.job.name))} at {schedule.at}\n"
        "\n"
        "[Timer]\n"
        f"OnCalendar=*-*-* {schedule.at}:00\n"
        f"Persistent={'false' if schedule.deadline and ':' in schedule.deadline else 'true'}\n"
        "\n"
        "[Install]\n"
        "WantedBy=timers.target\n"
    )


def crontab_line(schedule: Schedule) -> str:
    """One line; what the run says goes to a log file beside the job file."""
    hour, minute = parse_clock(schedule.at)
    words = [shlex.quote(word) for word in schedule.command]
    log = shlex.quote(str(schedule.job.base / f"{Path(schedule.job.source).stem}.cron.log"))
    environment = ""
    if schedule.environment_file is not None:
        environment = f"set -a && . {shlex.quote(str(schedule.environment_file))} && "
    command = f"cd {shlex.quote(str(schedule.job.base))} && {environment}{' '.join(words)} >> {log} 2>&1"
    return f"{minute} {hour} * * * {command.replace('%', chr(92) + '%')}"


def install_units(schedule: Schedule, directory: Path) -> list[Path]:
    """Writes the units into `directory`. Raises UsageError when units of that name belong to another job file."""
    units = systemd_units(schedule)
    service = directory / f"{schedule.unit}.service"
    if service.exists() and not _runs(service.read_text(encoding="utf-8"), schedule.command[2]):
        raise UsageError(f"{service}: is there already, for another job file; give one of the jobs another `name`")
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in units.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in units]


def _runs(service: str, job: str) -> bool:
    """Whether a service that this program wrote runs the job file."""
    command = service.partition("\nExecStart=")[2].partition("\n")[0]
    return f" run {_systemd_word(job)} " in f"{command} "


def _program() -> Path:
    """The `batchgen` script of the Python that runs now. Raises UsageError when it has none."""
    program = Path(sys.executable).absolute().with_name("batchgen")
    if not program.exists():
        raise UsageError(f"{program}: there is no batchgen beside this Python; install the package into it")
    return program


def _systemd_word(word: str) -> str:
    """A word of a command line as systemd reads it: quoted, no variables, no specifiers."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{_no_specifiers(escaped)}"' if _needs_quotes(word) else _no_specifiers(escaped)


def _needs_quotes(word: str) -> bool:
    return not word or any(character in " \t'\"\\;" for character in word)


def _no_pattern(path: str) -> str:
    """The path of an environment file, which systemd takes for a glob pattern."""
    return re.sub(r"[\\*?\[]", r"\\\g<0>", path)


def _no_specifiers(text: str) -> str:
    return text.replace("%", "%%")
