"""`run.on_finish`: who is told what and when, what is tried again, and that a hook never changes how a run ends."""

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_models import FakeEngine, FakeModels
from job_files import make_job, write_rows

from batchgen.engine.request import Request
from batchgen.jobs import hook, run
from batchgen.jobs.command_run import RunArguments, run_command
from batchgen.jobs.errors import UsageError
from batchgen.jobs.hook import Command, HookError, Webhook
from batchgen.jobs.stop import Stop

SAVE = f"{sys.executable} -c 'import sys, pathlib; pathlib.Path(\"told.json\").write_text(sys.stdin.read())'"


class Server:
    """A webhook on loopback: answers with `replies` (status, headers) one after the other, then with 204."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, dict[str, str]]] = []
        self.bodies: list[Any] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, headers = server.replies.pop(0) if server.replies else (204, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/secret-path?token=x"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()


def told(folder: Path) -> Any:
    return json.loads((folder / "told.json").read_text())


def test_a_command_gets_the_manifest(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    report = run(make_job(tmp_path, run__on_finish=SAVE), models=FakeModels())
    assert report.hook_error is None
    manifest = told(tmp_path)
    assert (manifest["state"], manifest["counts"], manifest["exit_code"]) == ("finished", report.counts, 0)
    assert (manifest["output"], manifest["error"]) == (str(tmp_path / "out"), None)


def test_a_webhook_gets_the_manifest(tmp_path: Path, server: Server) -> None:
    write_rows(tmp_path, 3)
    run(make_job(tmp_path, run__on_finish=server.url), models=FakeModels())
    assert [body["state"] for body in server.bodies] == ["finished"]


def test_nothing_to_do_is_no_news(tmp_path: Path, server: Server) -> None:
    write_rows(tmp_path, 3)
    job = make_job(tmp_path, run__on_finish=server.url)
    run(job, models=FakeModels())
    run(job, models=FakeModels())
    assert len(server.bodies) == 1


def test_a_deadline_and_a_failure_are_news(tmp_path: Path, server: Server) -> None:
    write_rows(tmp_path, 400)
    job = make_job(tmp_path, run__on_finish=server.url)
    stop = Stop(datetime.now() + timedelta(hours=1))

    def expire(request: Request) -> None:
        if request.key == 20:
            stop._deadline = datetime.now()

    assert run(job, models=FakeModels(FakeEngine(expire, seconds=0.01)), stop=stop).exit_code == 4

    def explode(request: Request) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        run(job, models=FakeModels(FakeEngine(explode)))
    states = [(body["state"], body["exit_code"], body["error"]) for body in server.bodies]
    assert states == [("stopped", 4, None), ("failed", 1, "RuntimeError: no more (--debug shows where)")]


def test_an_interrupted_run_is_gone_at_once(tmp_path: Path, server: Server) -> None:
    write_rows(tmp_path, 50)
    stop = Stop()

    def interrupt(request: Request) -> None:
        stop.reason = "interrupted"

    report = run(make_job(tmp_path, run__on_finish=server.url), models=FakeModels(FakeEngine(interrupt)), stop=stop)
    assert (report.exit_code, server.bodies) == (130, [])


@pytest.mark.parametrize(
    ("on_finish", "words"),
    [
        ("no-such-program --x", "no-such-program: No such file or directory"),
        (f"{sys.executable} -c 'raise SystemExit(\"the mail is down\")'", ": exit code 1: the mail is down"),
        ("http://127.0.0.1:9/x?token=secret", "http://127.0.0.1:9: [Errno 111] Connection refused (4 times)"),
    ],
)
def test_a_hook_that_fails_is_a_warning(
    tmp_path: Path, on_finish: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "PAUSES", (0.0, 0.0, 0.0))
    write_rows(tmp_path, 3)
    assert run_command(make_job(tmp_path, run__on_finish=on_finish), RunArguments(), models=FakeModels()) == 0
    shown = capsys.readouterr().err
    assert f"warning: {tmp_path / 'out'}: run.on_finish: " in shown
    assert words in shown
    assert "secret" not in shown
    log = (tmp_path / "out" / "__batchgen__" / "log.jsonl").read_text()
    assert "hook_failed" in log


def test_a_busy_server_is_asked_again_after_the_time_it_names(server: Server) -> None:
    pauses: list[float] = []
    server.replies = [(503, {}), (429, {"Retry-After": "7"}), (429, {"Retry-After": "9999"})]
    Webhook(server.url, pauses.append)({"a": 1})
    assert server.bodies == [{"a": 1}] * 4
    assert pauses == [1.0, 7.0, hook.LONGEST_PAUSE]


def test_a_date_as_retry_after(server: Server) -> None:
    pauses: list[float] = []
    server.replies = [(429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}), (429, {"Retry-After": "soon"})]
    Webhook(server.url, pauses.append)({})
    assert pauses == [0.0, 4.0]


def test_a_refusal_is_final(server: Server) -> None:
    server.replies = [(404, {})]
    with pytest.raises(HookError, match=r"^http://127\.0\.0\.1:\d+: 404 Not Found$"):
        Webhook(server.url, lambda seconds: None)({})
    assert len(server.bodies) == 1


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "COMMAND_SECONDS", 0.5)
    with pytest.raises(HookError, match="still running"):
        Command("sh -c 'sleep 60 & echo $! > pid; wait'", tmp_path)({})
    child = int((tmp_path / "pid").read_text())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(20)


def test_a_command_that_reads_nothing_is_fine(tmp_path: Path) -> None:
    Command("true", tmp_path)({"large": "x" * 10_000_000})


@pytest.mark.parametrize("on_finish", ["echo 'open", "  "])
def test_a_line_that_is_no_command_is_refused(tmp_path: Path, on_finish: str) -> None:
    with pytest.raises(UsageError, match=r"run\.on_finish: "):
        make_job(tmp_path, run__on_finish=on_finish)


@pytest.mark.parametrize(
    "on_finish",
    [
        "http://",
        "http://host:abc/x",
        "http://host/a b",
        "http://host/ä",
        "http://[::1/x",
        "https://me:word@host/x",
        "a\0b",
    ],
)
def test_a_hook_that_could_never_be_told_is_refused_before_the_run(tmp_path: Path, on_finish: str) -> None:
    with pytest.raises(UsageError, match=r"run\.on_finish: "):
        make_job(tmp_path, run__on_finish=on_finish)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_refusal_and_not_a_manifest_lost_on_the_way(server: Server, status: int) -> None:
    server.replies = [(status, {"Location": "/elsewhere"})]
    with pytest.raises(HookError, match=rf": {status} "):
        Webhook(server.url, lambda seconds: None)({})


def test_a_server_that_speaks_something_else_is_a_hook_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            for _ in range(len(hook.PAUSES) + 1):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(100_000)
                    connection.sendall(b"220 mail ready\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(HookError, match="mail ready"):
            Webhook(f"http://127.0.0.1:{listening.getsockname()[1]}/", lambda seconds: None)({})


def test_what_a_command_left_behind_is_killed_when_it_holds_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "COMMAND_SECONDS", 0.5)
    with pytest.raises(HookError, match="still running"):
        Command("sh -c 'sleep 60 & echo $! > pid'", tmp_path)({})
    child = int((tmp_path / "pid").read_text())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(20)
