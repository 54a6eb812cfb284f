"""An S3 server on loopback for a test session, and outputs on any file system as lists of rows."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.pipeline.place import RemotePath, below


@contextmanager
def s3_server() -> Iterator[str]:
    """A fresh server with the bucket `lake`; its address is in the environment while the block lasts."""
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir("lake")
        try:
            yield f"http://{host}:{port}"
        finally:
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            server.stop()


def clear_memory() -> None:
    """Forgets everything that was put to `memory://`."""
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def read_remote(output: RemotePath, form: str = "arrow") -> list[dict[str, Any]]:
    """The rows of a finished output; FileNotFoundError when there is none."""
    if form == "arrow":
        names = [entry["filename"] for entry in json.loads((output / "state.json").read_bytes())["_data_files"]]
        tables = [pa.ipc.open_stream((output / name).read_bytes()).read_all() for name in names]
    elif form == "parquet":
        paths = list((output / "data").glob("train-*.parquet"))
        tables = [pq.read_table(pa.BufferReader(path.read_bytes())) for path in paths]
    else:
        return [json.loads(line) for line in (output / "data.jsonl").read_text().splitlines()]
    return [row for table in tables for row in table.to_pylist()]


def visible_remote(output: RemotePath) -> list[str]:
    """Names a reader of the prefix sees."""
    try:
        found = [below(path, output) for path in output.rglob("*")]
    except FileNotFoundError:
        return []
    return sorted(str(path) for path in found if "__batchgen__" not in path.parts)


def bury_remote(output: RemotePath) -> None:
    """Makes the lock look as if its process were gone."""
    for path in (output / "__batchgen__").glob("lock-*.json"):
        path.write_bytes(json.dumps({**json.loads(path.read_bytes()), "started": -1.0}).encode())
