"""A sampler behind HTTP: the process that `launch.samplers` starts.

The routes are in `sampler/server/protocol.py`.

    event loop, in a thread ──queue──▶ the one thread that has the sampler: load, sample, score, release
        └ /health, files of weights: answered at once

A model's device, thread pool and modes belong to the thread that built it. Files of weights that this process does not
see are sent to it, and lie in memory that has a path but no name: nothing outlives the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from safetensors import SafetensorError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from runner.core.errors import DataError, SamplerError
from runner.core.media import MEDIA_ID
from runner.inference.http import HttpLimits, TokenCheck, error_response, http_url, listen, serve_in_thread
from runner.interfaces import Sampler
from runner.interfaces.media import ImageReader
from runner.sampler.server.protocol import (
    ADD_IMAGE,
    BEAT_S,
    LOAD,
    MAX_BODY_BYTES,
    PROTOCOL,
    RELEASE,
    SAMPLE,
    SCORE,
    STALE,
    Array,
    Endpoint,
    HeldWeights,
    Json,
    ServerError,
    WeightFile,
    decode,
    decode_requests,
    encode,
    encode_rollouts,
    encode_scores,
    endpoint_path,
    unpack_rows,
)
from runner.weight_sync.weight_store import StoredWeights

LIMITS = HttpLimits(max_body_bytes=1 << 40, connections_per_client=256)  # a file of weights may be as large as a tensor
log = logging.getLogger("runner")
Work = Callable[[], bytes]


class StaleWeightsError(Exception):
    """Other weights are held than the client names."""


class RolloutServer:
    """Serves one sampler. `run` belongs to the thread that has the sampler, `app` to the event loop."""

    def __init__(
        self,
        sampler: Sampler,
        token: str,
        device_stats: Callable[[], Mapping[str, float]] = dict,
        images: ImageReader | None = None,
    ) -> None:
        """device_stats: what was measured since the last call; images: the reader of the sampler."""
        self._sampler, self._device_stats, self._images = sampler, device_stats, images
        self.session = secrets.token_hex(8)
        self._held = HeldWeights(-1, "", self.session)
        self._queue: SimpleQueue[tuple[Future[bytes], Work]] = SimpleQueue()
        self._busy = False
        self._last: tuple[str, bytes] = ("", b"")  # the newest batch of rollouts, by its request
        self._received: dict[WeightFile, int] = {}  # descriptors of files that were sent here
        self._verbs = {SAMPLE: self._sample, SCORE: self._score, RELEASE: self._release, LOAD: self._load}
        self._verbs[ADD_IMAGE] = self._add_image
        routes = [Route(verb, self._post, methods=["POST"]) for verb in self._verbs]
        put = Route("/weights/{name}", self._put_file, methods=["PUT"])
        health = Route("/health", self._health)
        app = Starlette(routes=[*routes, put, health], exception_handlers={HTTPException: _http_error})
        self.app = TokenCheck(app, token)

    def run(self) -> NoReturn:
        """Handle requests in order, until one raises SamplerError outside of a load, or a signal arrives."""
        while True:
            future, work = self._queue.get()
            if not future.set_running_or_notify_cancel():
                continue
            self._busy = True
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(ConnectionAbortedError("the sampler exits"))
                raise error
            finally:
                self._busy = False

    def close(self) -> None:
        """Free the memory of files that were sent here."""
        self._drop_files(self._received)

    # -- the event loop's side

    async def _health(self, _: Request) -> JSONResponse:
        held, longest = asdict(self._held), self._sampler.max_model_len
        more = {"busy": self._busy, "waiting": self._queue.qsize()}
        return JSONResponse({"protocol": PROTOCOL, "held": held, "max_model_len": longest, **more})

    async def _post(self, request: Request) -> Response:
        """Queue the work; its response begins at once, and ends with the result."""
        body = bytearray()
        async for block in request.stream():
            body += block
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is above {MAX_BODY_BYTES} bytes")
        try:
            header, arrays = decode(bytes(body))
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        path = request.url.path
        key = f"{path} {hashlib.blake2b(body).hexdigest()}"
        future: Future[bytes] = Future()
        self._queue.put((future, partial(self._answer, path, header, arrays, key)))
        return StreamingResponse(_follow(future), media_type="application/octet-stream")

    async def _put_file(self, request: Request) -> Response:
        """Receive a file of weights."""
        query = request.query_params
        try:
            file = WeightFile(request.path_params["name"], int(query["size"]), int(query["mtime_ns"]))
        except (KeyError, ValueError) as error:
            raise HTTPException(400, f"size and mtime_ns are required: {error}") from error
        handle, received = os.memfd_create("weights"), 0
        try:
            with open(handle, "wb", closefd=False) as memory:
                async for block in request.stream():
                    received += memory.write(block)
            if received != file.size:
                raise HTTPException(400, f"{received} of {file.size} bytes arrived")
            if self._received.setdefault(file, handle) == handle:
                handle = -1
        finally:
            if handle >= 0:
                os.close(handle)
        return Response(status_code=200)

    # -- the sampler's side

    def _answer(self, verb: str, header: Json, arrays: Sequence[Array], key: str) -> bytes:
        """The response's body. A batch whose response was lost is not sampled again.

        Raises SamplerError where the sampler is gone, an engine without its workers: this process ends then.
        """
        if self._last[0] == key:
            return self._last[1]
        self._last = ("", b"")
        try:
            answer = self._verbs[verb](header, arrays)
        except StaleWeightsError as error:
            answer = encode(self._header(ServerError(STALE, str(error), SamplerError.exit_code)))
        except Exception as error:
            log.warning("%s failed", verb, exc_info=True)
            if isinstance(error, SamplerError) and verb != LOAD:  # a load fails by what was sent, too
                raise
            return encode(self._header(ServerError.from_exception(error)))
        if verb == SAMPLE:
            self._last = (key, answer)
        return answer

    def _header(self, error: ServerError | None = None) -> Json:
        header: Json = {"held": asdict(self._held), "device": dict(self._device_stats())}
        return header if error is None else {**header, "error": asdict(error)}

    def _sample(self, header: Json, arrays: Sequence[Array]) -> bytes:
        self._check_weights(header)
        requests = decode_requests(header, arrays)
        if self._images is not None:
            used = {one for request in requests for one in request.prompt if one >= MEDIA_ID}
            self._images.forget(used)
            if missing := [one for one in used if one not in self._images]:
                return encode({**self._header(), "missing": missing})
        return encode_rollouts(self._sampler.sample(requests), self._header())

    def _add_image(self, header: Json, arrays: Sequence[Array]) -> bytes:
        assert self._images is not None  # it has asked for the image
        entry, _ = self._images.add(arrays[0].tobytes(), several=header["several"])
        if entry.id != header["id"]:
            raise DataError(
                "an image has another id than the trainer's; use one version of transformers on all machines"
            )
        return encode(self._header())

    def _score(self, header: Json, arrays: Sequence[Array]) -> bytes:
        self._check_weights(header)
        return encode_scores(self._sampler.score(unpack_rows(*arrays)), self._header())

    def _release(self, header: Json, arrays: Sequence[Array]) -> bytes:
        self._sampler.release_memory()
        return encode(self._header())

    def _load(self, header: Json, arrays: Sequence[Array]) -> bytes:
        version, digest = int(header["version"]), str(header["digest"])
        named = {Path(path): WeightFile(Path(path).name, int(size), int(time)) for path, size, time in header["files"]}
        self._drop_files(self._received.keys() - named.values())
        files = [self._find_file(path, file) for path, file in named.items()]
        if missing := [str(path) for path, found in zip(named, files, strict=True) if found is None]:
            return encode({**self._header(), "missing": missing})
        try:
            weights = StoredWeights([path for path in files if path is not None], version)
            found = weights.digest
        except (OSError, SafetensorError) as error:
            self._drop_files(self._received)
            raise SamplerError(f"the weights of version {version} cannot be read: {error}") from error
        if found != digest:
            self._drop_files(self._received)  # what is the same in every version is sent again, too
            raise SamplerError(f"the weights of version {version} differ from those sent: {found}, not {digest}")
        self._held = HeldWeights(-1, "", self.session)  # while they change, and if that fails half-way
        self._sampler.load_weights(weights, version)
        self._held = HeldWeights(version, digest, self.session)
        self._drop_files([file for file in self._received if not file.is_fixed])
        return encode(self._header())

    def _find_file(self, path: Path, file: WeightFile) -> Path | None:
        """Where this process can read a file: at the trainer's path, or where it was received; None = nowhere."""
        if (handle := self._received.get(file)) is not None:
            return Path(f"/proc/{os.getpid()}/fd/{handle}")  # which processes started from here can open, too
        return path if path.exists() and WeightFile.at(path) == file else None

    def _check_weights(self, header: Json) -> None:
        if not self._held.match(header["version"], header["digest"]):
            raise StaleWeightsError(f"this server has {self._held}, but version {header['version']} was requested")

    def _drop_files(self, files: Any) -> None:
        for file in list(files):
            os.close(self._received.pop(file))


def serve(
    sampler: Sampler,
    index: int,
    endpoints: Path,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int = 0,
    device_stats: Callable[[], Mapping[str, float]] = dict,
    images: ImageReader | None = None,
) -> NoReturn:
    """Serve `sampler` as server number `index` of a job, until an error; this thread alone uses it.

    endpoints: the folder in which clients look for servers; host: the address of this machine to listen at, and at
    which clients reach it; port: 0 = any free one; images: the reader of the sampler. Raises EnvironmentProblem where
    the address cannot be had, OSError where the endpoint file cannot be written.
    """
    with closing(sampler), closing(RolloutServer(sampler, token, device_stats, images)) as server:
        listener = listen(host, port)
        endpoint = Endpoint(http_url(host, listener.getsockname()[1]), os.getpid(), server.session)
        with serve_in_thread(server.app, listener, LIMITS), _endpoint_file(endpoint_path(endpoints, index), endpoint):
            log.info("listens at %s", endpoint.url)
            server.run()


@contextmanager
def _endpoint_file(path: Path, endpoint: Endpoint) -> Iterator[None]:
    """While the block runs the endpoint file is there; a successor's stays."""
    try:
        endpoint.write(path)  # a signal may arrive when the file is there, and this has not returned
        yield
    finally:
        try:
            own = Endpoint.read(path) == endpoint
        except (OSError, ValueError):  # it was removed, or is another's
            own = False
        if own:
            path.unlink(missing_ok=True)


async def _follow(future: Future[bytes]) -> AsyncIterator[bytes]:
    """Yield a line feed each second, then the result; a disconnect before the work begins cancels it."""
    result = asyncio.wrap_future(future)
    try:
        while not (await asyncio.wait([result], timeout=BEAT_S))[0]:
            yield b"\n"
        if result.exception() is None:  # else the sampler exits, and the client retries its successor
            yield result.result()
    finally:
        result.cancel()


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(error.status_code, error.detail)
    response.headers["Connection"] = "close"
    return response
