"""`batchgen schedule`: units that systemd accepts, a crontab line that a shell reads back, what is overwritten."""

import configparser
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_files import make_job, write_rows

from batchgen.jobs.command_schedule import schedule_job
from batchgen.jobs.errors import UsageError
from batchgen.jobs.job import Job
from batchgen.jobs.schedule import Schedule, _systemd_word, crontab_line, make_schedule, systemd_units

systemd = shutil.which("systemd-analyze")


def unit(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def a_job(folder: Path, **overrides: object) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder, 1)
    return make_job(folder, **overrides)


def test_units_name_the_job_its_time_and_its_deadline(tmp_path: Path) -> None:
    schedule = make_schedule(a_job(tmp_path), "2:00", "06:00", ("generation.max_tokens=8",))
    units = systemd_units(schedule)
    service, timer = unit(units["batchgen-job.service"]), unit(units["batchgen-job.timer"])
    words = shlex.split(service["Service"]["ExecStart"])
    assert words[1:] == [
        "run", str(tmp_path / "job.yaml"), "--set", "generation.max_tokens=8", "--deadline", "06:00",
    ]  # fmt: skip
    assert Path(words[0]).exists()
    assert service["Service"]["SuccessExitStatus"] == "4 75"
    assert timer["Timer"]["OnCalendar"] == "*-*-* 02:00:00"


@pytest.mark.parametrize(("deadline", "persistent"), [(None, "true"), ("4h", "true"), ("06:00", "false")])
def test_a_night_that_was_missed_is_made_up_for_unless_its_end_is_a_time_of_day(
    tmp_path: Path, deadline: str | None, persistent: str
) -> None:
    timer = unit(systemd_units(make_schedule(a_job(tmp_path), "02:00", deadline, ()))["batchgen-job.timer"])
    assert timer["Timer"]["Persistent"] == persistent


def verify(folder: Path, *units: Path) -> tuple[int, str]:
    """Exit code of `systemd-analyze verify`, and what it said."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    command = [str(systemd), "verify", "--user", *map(str, units)]
    checked = subprocess.run(command, capture_output=True, text=True, env=environment)
    return checked.returncode, checked.stderr


@pytest.mark.skipif(systemd is None, reason="no systemd on this machine")
@pytest.mark.parametrize("folder", ["plain", "with space", "100% $HOME 'q' \"d\""])
def test_systemd_accepts_the_units(tmp_path: Path, folder: str) -> None:
    schedule = make_schedule(a_job(tmp_path / folder), "02:00", "4h", ('prompt.text="$x 5%"',))
    paths = [tmp_path / name for name in systemd_units(schedule)]
    for path, text in zip(paths, systemd_units(schedule).values(), strict=True):
        path.write_text(text)
    code, said = verify(tmp_path, *paths)
    assert (code, [line for line in said.splitlines() if "batchgen-" in line]) == (0, []), said


@pytest.mark.skipif(systemd is None, reason="no systemd on this machine")
def test_systemd_would_have_said_so(tmp_path: Path) -> None:
    text = systemd_units(make_schedule(a_job(tmp_path), "02:00", None, ()))["batchgen-job.service"]
    (tmp_path / "batchgen-job.service").write_text(text.replace("ExecStart=", "ExecStart=relative/"))
    code, said = verify(tmp_path, tmp_path / "batchgen-job.service")
    assert code != 0
    assert "batchgen-job.service" in said


@given(st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1))
def test_a_word_is_what_systemd_reads_back(word: str) -> None:
    read = _systemd_word(word).replace("%%", "%").replace("$$", "$")
    assert shlex.split(read, posix=True) == [word] if read.startswith('"') else read == word


def test_the_crontab_line_is_read_back_by_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "it's 100% here"
    schedule = make_schedule(a_job(folder), "23:05", "30m", ())
    line = crontab_line(schedule)
    assert line.startswith("5 23 * * * ")
    assert "%" not in line.replace("\\%", "")  # to cron a bare one is the end of the command
    command = line.split(" ", 5)[5].replace("\\%", "%")
    words = shlex.split(command)
    assert words[:3] == ["cd", str(folder), "&&"]
    assert words[4:8] == ["run", str(folder / "job.yaml"), "--deadline", "30m"]


def test_variables_of_the_job_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD_HERE", "hello")
    job = a_job(tmp_path, prompt__text="${WORD_HERE} {{ word }} $${NOT_THIS}")
    schedule = make_schedule(job, "02:00", None, ())
    service = systemd_units(schedule)["batchgen-job.service"]
    assert unit(service)["Service"]["EnvironmentFile"] == str(tmp_path / "job.env")
    assert "for WORD_HERE\n" in service
    assert "hello" not in service
    assert f". {tmp_path / 'job.env'} &&" in crontab_line(schedule)


def test_install_writes_units_and_leaves_those_of_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    job, other = a_job(tmp_path / "one"), a_job(tmp_path / "two")
    said = list(schedule_job(job, "02:00", install=True))
    service = tmp_path / "config" / "systemd" / "user" / "batchgen-job.service"
    assert said[0] == f"wrote {service}"
    assert "enable --now batchgen-job.timer" in said[2]
    list(schedule_job(job, "03:00", install=True))  # the same job may change its time
    assert "03:00" in service.with_suffix(".timer").read_text()
    before = service.read_text()
    with pytest.raises(UsageError, match="for another job file; give one of the jobs another `name`"):
        list(schedule_job(other, "02:00", install=True))
    assert service.read_text() == before


@pytest.mark.parametrize(
    ("at", "deadline", "form", "install", "message"),
    [
        ("25:00", None, "systemd", False, "--at: must be a time of day like 02:00, got '25:00'"),
        ("2h", None, "systemd", False, "--at: must be a time of day like 02:00, got '2h'"),
        ("02:00", "soon", "systemd", False, "--deadline: must be a time like 06:00"),
        ("02:00", "2:00", "systemd", False, "--deadline: 2:00 is the time of the start"),
        ("02:00", None, "cron", True, "--install: writes systemd units"),
    ],
)
def test_refusals(tmp_path: Path, at: str, deadline: str | None, form: str, install: bool, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(schedule_job(a_job(tmp_path), at, deadline, form=form, install=install))


def test_a_path_that_no_unit_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rename it"):
        make_schedule(a_job(tmp_path / "a\nb"), "02:00", None, ())


def test_units_are_named_after_the_job(tmp_path: Path) -> None:
    assert Schedule(a_job(tmp_path, name="Büro: docs/2026 @home"), "02:00").unit == "batchgen-B-ro-docs-2026-home"


@pytest.mark.parametrize("folder", ["a\\", "a "])
def test_a_folder_whose_end_a_unit_would_swallow_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(UsageError, match="rename it"):
        make_schedule(a_job(tmp_path / folder), "02:00", None, ())


def test_a_job_whose_path_ends_like_another_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    job = a_job(tmp_path)
    list(schedule_job(a_job(Path(f"{tmp_path / 'copy'}{job.base}")), "02:00", install=True))
    with pytest.raises(UsageError, match="for another job file"):
        list(schedule_job(job, "02:00", install=True))


def test_a_file_of_variables_is_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "x")
    folder = tmp_path / "[a] *b? c\\d"
    folder.mkdir()
    (folder / "job.env").touch()
    job = a_job(folder, name="${WORD}")
    service = systemd_units(make_schedule(job, "02:00", None, ()))["batchgen-x.service"]
    pattern = service.partition("\nEnvironmentFile=")[2].partition("\n")[0].replace(" ", "\\ ")
    matched = subprocess.run(["sh", "-c", f"printf %s {pattern}"], capture_output=True, check=True)
    assert matched.stdout.decode() == str(folder / "job.env")
