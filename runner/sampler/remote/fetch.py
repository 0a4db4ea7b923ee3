"""Weights from another machine, streamed into memory that has a path but no name: nothing outlives this process.

http://trainer:port/…/v7-0000.safetensors ──blocks──▶ memfd ──▶ /proc/<pid>/fd/N: read like any file, also by processes
that are started from here. What is the same in every version is fetched once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from runner.core.errors import SamplerError
from runner.sampler.remote.listening import SILENCE_S
from runner.sampler.remote.wire import authorization
from runner.weight_sync.shelf import FIXED

BLOCK_BYTES = 4 << 20
AT_ONCE = 4  # files
Get = Callable[[str, int], None]  # puts what is behind an address into an open file; raises OSError, HTTPException


class UnfetchedError(SamplerError):
    """A file of another machine could not be had; it may later."""


class UnsharedError(SamplerError):
    """Trainer and sampler are on one machine and do not see the same files there, so weights have to be fetched."""


class Fetched:
    """Files of other machines, by their addresses, while they are held in this one's memory. get: how they get there"""

    def __init__(self, get: Get) -> None:
        self._get = get
        self._handles: dict[str, int] = {}

    def files(self, urls: Sequence[str]) -> list[Path]:
        """What is behind the addresses, in their order; all else is dropped. Raises UnfetchedError."""
        self._drop([url for url in self._handles if url not in urls])
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                pending = [pool.submit(self._fetch, url) for url in dict.fromkeys(urls) if url not in self._handles]
                for one in pending:
                    one.result()
            except BaseException:  # a signal, too
                pool.shutdown(wait=False, cancel_futures=True)  # those that have not begun
                raise
        return [Path(f"/proc/{os.getpid()}/fd/{self._handles[url]}") for url in urls]

    def drop_changed(self) -> None:
        """Give back what only one version has."""
        self._drop([url for url in self._handles if not urlsplit(url).path.rpartition("/")[2].startswith(FIXED)])

    def close(self) -> None:
        """Give back everything."""
        self._drop(list(self._handles))

    def _drop(self, urls: Sequence[str]) -> None:
        for url in urls:
            os.close(self._handles.pop(url))

    def _fetch(self, url: str) -> None:
        handle = os.memfd_create("weights")
        try:
            self._get(url, handle)
            self._handles[url] = handle
        except (OSError, HTTPException) as error:
            raise UnfetchedError(f"{url} cannot be fetched: {str(error) or type(error).__name__}") from error
        finally:
            if url not in self._handles:
                os.close(handle)


def over_http(token: str, url: str, handle: int) -> None:
    """`Get`, from a server that wants the token."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=SILENCE_S)
    try:
        connection.request("GET", parts.path, headers={"Authorization": authorization(token)})
        with connection.getresponse() as response:  # which has the socket, where the connection ends after it
            if response.status != 200:
                raise HTTPException(f"status {response.status}")
            wanted, block = response.length, memoryview(bytearray(BLOCK_BYTES))
            while size := response.readinto(block):
                _write(handle, block[:size])
        if wanted != os.fstat(handle).st_size:
            raise HTTPException(f"{os.fstat(handle).st_size} of {wanted} bytes arrived")
    finally:
        connection.close()


def _write(handle: int, content: memoryview) -> None:
    while content:
        content = content[os.write(handle, content) :]
