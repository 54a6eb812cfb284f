"""Runs rows through a `llama-server` that it starts: as many requests at a time as the server has slots."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from protocol import read_call, warm_prompts, write_result

CONTEXT, STEP_TOKENS, PIECE_TOKENS = 32768, 2048, 512


def ask(port: int, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def complete(port: int, row: dict[str, Any], seed: int) -> dict[str, Any]:
    settings = {"temperature": row["temperature"], "seed": seed, "ignore_eos": True, "cache_prompt": True}
    return ask(
        port, {"prompt": row["tokens"], "n_predict": row["max_tokens"], "return_tokens": True, "top_k": 0, **settings}
    )


def start_server(options: dict[str, Any], port: int) -> subprocess.Popen[bytes]:
    command = [options["server"], "-m", options["model"], "--port", port, "-t", len(os.sched_getaffinity(0))]
    command += ["-np", options["batch"], "-c", CONTEXT, "-kvu", "-b", STEP_TOKENS, "-ub", PIECE_TOKENS]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(options["server"]).parent)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(list(map(str, command)), env=environment, **quiet)


def wait(server: subprocess.Popen[bytes], port: int) -> None:
    """Until the server has answered once. Raises SystemExit when it stops instead."""
    row = {"tokens": warm_prompts()[2], "max_tokens": 4, "temperature": 0}
    while True:
        try:
            complete(port, row, 0)
            return
        except OSError:
            if server.poll() is not None:
                raise SystemExit(f"{server.args[0]} stopped with {server.returncode}") from None
            time.sleep(0.2)


def main() -> None:
    rows, options = read_call(sys.argv)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server, ends = start_server(options, port), []
    try:
        wait(server, port)

        def work(item: tuple[dict[str, Any], int]) -> dict[str, Any]:
            answer = complete(port, *item)
            ends.append(time.time())
            return answer

        start = time.time()
        with ThreadPoolExecutor(options["batch"]) as pool:
            outputs = list(pool.map(work, [(row, seed) for row in rows for seed in range(row["n"])]))
    finally:
        server.terminate()
        server.wait()
    results = iter(outputs)
    write_result(
        start=start,
        first=min(ends),
        end=max(ends),
        computed_prompt_tokens=sum(output["timings"]["prompt_n"] for output in outputs),
        answers=[[next(results)["tokens"] for _ in range(row["n"])] for row in rows],
    )


if __name__ == "__main__":
    main()
