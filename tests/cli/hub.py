"""Stand-in for the Hugging Face hub on 127.0.0.1, with the routes of a download."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote

from tests.waits import LIMIT_SECONDS

__all__ = ["Hub", "Repository"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Repository:
    """Repository with files by name.

    With `status` and `error_code`, requests get that answer instead: all of them, or with
    `files_alone` only those for files. With `hold`, the weights are sent once it is set.
    """

    def __init__(
        self,
        files: dict[str, bytes],
        *,
        status: int = 200,
        error_code: str = "",
        files_alone: bool = False,
        hold: threading.Event | None = None,
    ) -> None:
        self.files = files
        self.status = status
        self.error_code = error_code
        self.files_alone = files_alone
        self.hold = hold


class Hub:
    """Context manager that serves repositories. `asked` has the requested paths."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for repository in self.repositories.values():
            if repository.hold is not None:
                repository.hold.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = unquote(request.path.partition("?")[0])
        self.asked.append(path)
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repository = self.repositories.get("/".join(parts[2:4] if is_api else parts[:2]))
        if repository is None:
            self._refuse(request, 401, "RepoNotFound")
        elif repository.status != 200 and not (is_api and repository.files_alone):
            self._refuse(request, repository.status, repository.error_code)
        elif is_api and "tree" in parts:
            self._send(request, _json(_tree(repository)), {}, with_body)
        elif is_api:
            self._send(request, _json(_info("/".join(parts[2:4]), repository)), {}, with_body)
        else:
            self._file(request, repository, "/".join(parts[4:]), with_body)

    def _file(
        self, request: BaseHTTPRequestHandler, repository: Repository, name: str, with_body: bool
    ) -> None:
        data = repository.files.get(name)
        if data is None:
            self._refuse(request, 404, "EntryNotFound")
            return
        headers = {"ETag": f'"{_blob(data)}"', "X-Repo-Commit": COMMIT}
        if with_body and repository.hold is not None and name.endswith(".safetensors"):
            self._send(request, data, headers, with_body, hold=repository.hold)
        else:
            self._send(request, data, headers, with_body)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        data: bytes,
        headers: dict[str, str],
        with_body: bool,
        hold: threading.Event | None = None,
    ) -> None:
        request.send_response(200)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if not with_body:
            return
        half = len(data) // 2
        request.wfile.write(data[:half])
        request.wfile.flush()
        if hold is not None:
            hold.wait(LIMIT_SECONDS)
        request.wfile.write(data[half:])

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        if code:
            request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _blob(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _info(hub_id: str, repository: Repository) -> dict[str, Any]:
    siblings = [
        {"rfilename": name, "size": len(data), "blobId": _blob(data)}
        for name, data in repository.files.items()
    ]
    return {"_id": "1", "id": hub_id, "sha": COMMIT, "private": False, "siblings": siblings}


def _tree(repository: Repository) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": len(data), "oid": _blob(data)}
        for name, data in repository.files.items()
    ]
