"""The weights of rank 0 for samplers on other machines: the files that are on offer now, by GET."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from runner.sampler.remote.listening import Handler, Listening


class Offer:
    """Servers of files, one for each address at which samplers reach this machine, made when it is first needed.

    server: makes one, of the address, the token, and the files that are on offer by their paths there
    """

    def __init__(self, token: str, server: Callable[[str, str, dict[str, Path]], Listening] | None = None) -> None:
        self._token, self._server = token, server or Server
        self._files: dict[str, Path] = {}
        self._servers: dict[str, Listening] = {}
        self._lock = threading.Lock()
        self._closing = ExitStack()

    def urls(self, host: str, files: Sequence[Path]) -> list[str]:
        """Where files can be had by who reaches this machine at `host`; another file never has the same address.

        Raises OSError where they are gone, or this machine cannot listen there.
        """
        names = {_name(path): path for path in files}
        with self._lock:
            self._files.update(names)
            if host not in self._servers:
                self._servers[host] = self._server(host, self._token, self._files)
                self._closing.enter_context(self._servers[host].running())
            return [self._servers[host].url + name for name in names]

    def clear(self) -> None:
        """Take everything off."""
        with self._lock:
            self._files.clear()

    def close(self) -> None:
        """End the servers."""
        with self._lock:
            self._closing.close()
            self._servers.clear()


def _name(path: Path) -> str:
    status = path.stat()
    return f"/{status.st_ino}-{status.st_mtime_ns}/{path.name}"


class Server(Listening):
    """Answers with files."""

    def __init__(self, host: str, token: str, files: dict[str, Path], handler: type[FileHandler] | None = None) -> None:
        """Raises OSError where the address cannot be had."""
        self.files = files
        super().__init__(host, 0, token, handler or FileHandler)


class FileHandler(Handler):
    """One question for a file."""

    server: Server

    def do_GET(self) -> None:
        """Send a file that is on offer."""
        if not self.known() or (path := self.offered()) is None:
            return
        with path.open("rb") as file:
            self.head(200, {"Content-Length": str(path.stat().st_size)})
            self.connection.sendfile(file)

    def offered(self) -> Path | None:
        """The file that is asked for; where it is not on offer, that is said."""
        path = self.server.files.get(self.path)
        if path is None or not path.exists():
            self.say(404, b"not on offer\n", "text/plain")
            return None
        return path
