"""Servers that answer as several versions of vLLM do, over real HTTP, with numbers that a small model computes.

What is drawn and reported is written anew here, with plain sorts and softmaxes, and shares no line with what is tested.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Json = dict[str, Any]


@dataclass(frozen=True)
class Version:
    """What of a version's manners a client can see. name: None = it is no vLLM, and does not say."""

    name: str | None
    token_ids: bool = True  # return_token_ids is known, else ids come as placeholders of tokens
    placeholders: bool = True
    at_once: bool = True  # reload_weights takes a path
    silent_reset: bool = False  # /reset_prefix_cache does not say whether it did
    hottest: float = 100.0  # a higher temperature is refused
    metrics: bool = True  # it says when its process began


V10 = Version("0.10.1", token_ids=False, at_once=False, silent_reset=True)
V11 = Version("0.11.0", at_once=False, silent_reset=True)
V14 = Version("0.14.0", at_once=False, silent_reset=True)
V23 = Version("0.23.0")
V32 = Version("0.32.0", hottest=2.0)
OTHER = Version(None, token_ids=False, placeholders=False)


@dataclass
class Fault:
    """What happens to the next `times` answers to /v1/completions that were asked for as a rollout."""

    kind: str
    times: int = 1


@dataclass
class StandIn:
    """A server with one model; `base` is what it was started with."""

    base: nn.Module
    version: Version = V32
    mode: str = "processed"
    key: str | None = None
    tokenizer: Any = None
    adapters_on: bool = True
    development_on: bool = True
    max_model_len: int | None = 128
    keeps_old_weights: bool = False  # reports success, and does nothing
    faults: list[Fault] = field(default_factory=list)
    broken: dict[str, list[str]] = field(default_factory=dict)  # path, or "score" → what happens to the next requests
    calls: list[str] = field(default_factory=list)
    bodies: list[Json] = field(default_factory=list)
    most: int = 0  # requests under way at once

    def __post_init__(self) -> None:
        self.lock, self.held = threading.RLock(), threading.Lock()
        self.now = 0
        self.stop = threading.Event()
        self.start()

    def start(self) -> None:
        """As it is after its process has begun."""
        # the time first: who finds that an adapter is gone reads it next
        self.started, self.model, self.adapters = 1000.0 + len(self.calls), deepcopy(self.base), {}
        self.asleep, self.path = False, ""

    def breaks(self, what: str) -> str:
        """What happens to this request, "" = nothing."""
        kinds = self.broken.get(what)
        return kinds.pop(0) if kinds else ""

    def at_work(self, change: int) -> None:
        with self.held:
            self.now += change
            self.most = max(self.most, self.now)

    # -- the model

    def logits(self, model: nn.Module, ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return found.double()

    def draw(self, body: Json, model: nn.Module) -> tuple[list[int], list[float], str, Any]:
        """Ids, log-probabilities as the server reports them, finish_reason and stop_reason."""
        generator = torch.Generator().manual_seed(body["seed"])
        ids, logprobs = list(body["prompt"]), list[float]()
        while True:
            logits = self.logits(model, ids)[-1]
            tempered = logits / body["temperature"]
            kept = cut(tempered, body.get("top_k", -1), body.get("top_p", 1.0), body.get("min_p", 0.0))
            token = int(torch.multinomial(kept.softmax(-1), 1, generator=generator))
            reported = {"processed": kept, "raw": logits, "tempered": tempered}[self.mode]
            ids.append(token)
            logprobs.append(float(reported.log_softmax(-1)[token]))
            new = ids[len(body["prompt"]) :]
            if token in body.get("stop_token_ids", ()) or (token == 258 and not body.get("ignore_eos")):
                return new, logprobs, "stop", token
            text = self.tokenizer.decode(new) if body.get("stop") else ""
            if seen := [string for string in body.get("stop", ()) if string in text]:
                return new, logprobs, "stop", seen[0]
            if len(new) == body["max_tokens"]:
                return new, logprobs, "length", None

    def complete(self, body: Json) -> tuple[int, Json]:
        model = self.adapters.get(body["model"], self.model if body["model"] == "policy" else None)
        if model is None:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if body["temperature"] > self.version.hottest:
            return 400, {"error": {"message": f"temperature must be in [0, {self.version.hottest:g}]"}}
        if self.asleep:
            return 500, {"error": {"message": "asleep"}}
        with self.lock:
            ids, logprobs, finish, reason = self.draw(body, model)
            choice: Json = {"index": 0, "text": "", "finish_reason": finish, "stop_reason": reason}
            if body.get("prompt_logprobs") is not None and self.version.name:
                values = self.logits(model, body["prompt"]).log_softmax(-1)
                pairs = zip(values, body["prompt"][1:], strict=False)
                choice["prompt_logprobs"] = [None, *({str(t): {"logprob": float(row[t])}} for row, t in pairs)]
        tokens = [f"token_id:{t}" if self.version.placeholders else self.tokenizer.decode([t]) for t in ids]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": logprobs}
        if self.version.token_ids and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        return 200, {"id": "cmpl-1", "choices": [choice]}

    def spoil(self, answer: Json, kind: str, limit: int) -> None:
        """An answer that cannot be right."""
        choice = answer["choices"][0]
        ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if kind == "empty":
            ids[:], values[:] = [], []
        elif kind == "long":
            ids[:], values[:] = [5] * (limit + 1), [-1.0] * (limit + 1)
        elif kind == "foreign":
            ids[-1] = 10**6
        elif kind == "infinite":
            values[0] = -9999.0
        elif kind == "missing":
            values[0] = None
        elif kind == "short":
            ids[:], values[:] = [5], [-1.0]
        elif kind == "prompt":
            choice["prompt_token_ids"] = [1, *choice["prompt_token_ids"]]
        elif kind == "none":
            answer["choices"] = []

    # -- what is done to it

    def manage(self, path: str, body: Json) -> tuple[int, Any]:
        with self.lock:
            if path.endswith("_lora_adapter"):
                return self.adapter(path, body) if self.adapters_on else (404, {"detail": "Not Found"})
            if not self.development_on:
                return 404, {"detail": "Not Found"}
            if path == "/collective_rpc":
                return self.rpc(body)
            if path == "/reset_prefix_cache":
                return 200, None if self.version.silent_reset else {"success": True}
            if path.startswith(("/sleep", "/wake_up")):
                self.asleep = path.startswith("/sleep")
                return 200, None
            return 404, {"detail": "Not Found"}

    def adapter(self, path: str, body: Json) -> tuple[int, Any]:
        from peft import PeftModel

        name, folder = body["lora_name"], body.get("lora_path")
        if path == "/v1/unload_lora_adapter":
            return (200, "Success: removed") if self.adapters.pop(name, None) else (404, {"error": {"message": "none"}})
        if not name or not folder:
            return 400, {"error": {"message": "Both 'lora_name' and 'lora_path' must be provided."}}
        if name in self.adapters:
            return 400, {"error": {"message": "already loaded"}}
        if not Path(folder, "adapter_model.safetensors").is_file():
            return 404, {"error": {"message": f"No adapter found for {folder}"}}
        with warnings.catch_warnings(action="ignore"):  # peft asks transformers under an older name
            self.adapters[name] = PeftModel.from_pretrained(deepcopy(self.model), folder).eval()
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def rpc(self, body: Json) -> tuple[int, Any]:
        method, options = body.get("method"), body.get("kwargs", {})
        if method is None:
            return 400, {"detail": "Missing 'method' in request body"}
        if method == "update_config":
            self.path = options["overrides"]["model_config"]["model"]
            return 200, {"results": [None]}
        if method != "reload_weights":
            return 500, {"error": {"message": f"no {method}"}}
        if "weights_path" in options and not self.version.at_once:
            return 500, {"error": {"message": "reload_weights() got an unexpected keyword argument 'weights_path'"}}
        folder = Path(options.get("weights_path", self.path))
        files = sorted(folder.glob("*.safetensors"))
        if not files or not (folder / "config.json").is_file():
            return 500, {"error": {"message": f"Cannot find any model weights with `{folder}`"}}
        if not self.keeps_old_weights:
            self.model.load_state_dict({n: t for file in files for n, t in load_file(file).items()}, strict=True)
        return 200, {"results": [None]}


def cut(values: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Logits with -inf where the id is not to be drawn."""
    if top_k > 0:
        values = torch.where(values < values.topk(top_k).values[-1], -torch.inf, values)
    if top_p < 1:
        order = values.argsort(descending=True)
        p = values.softmax(-1)[order]
        values = values.index_fill(0, order[p.cumsum(0) - p >= top_p], -torch.inf)
    if min_p > 0:
        p = values.softmax(-1)
        values = torch.where(p < min_p * p.max(), -torch.inf, values)
    return values


class Handler(BaseHTTPRequestHandler):
    stand_in: StandIn

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        s = self.stand_in
        s.calls.append(self.path)
        kind = s.breaks(self.path)
        if kind.isdigit():
            self.answer(int(kind), {"detail": "broken"})
            return
        known: dict[str, Callable[[], Any]] = {
            "/v1/models": lambda: {
                "data": [
                    {"id": "policy", "max_model_len": s.max_model_len},
                    *({"id": a, "parent": "policy"} for a in s.adapters),
                ]
            }
        }
        if s.version.name:
            known["/version"] = lambda: {"version": s.version.name}
        if s.version.name and s.version.metrics:
            known["/metrics"] = lambda: f"# HELP x\nprocess_start_time_seconds {s.started}\n"
        if self.path.startswith("/v1") and self.locked():
            return
        if self.path not in known:
            self.answer(404, {"detail": "Not Found"})
        elif kind == "cut":
            self.raw(200, b"# HELP x", less=3)
        else:
            self.answer(200, known[self.path]())

    def do_POST(self) -> None:
        s = self.stand_in
        s.calls.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/v1") and self.locked():
            return
        if kind := s.breaks(self.path):
            self.answer(int(kind), {"detail": "broken"})
            return
        if self.path != "/v1/completions":
            self.answer(*s.manage(self.path, body))
            return
        s.at_work(1)
        self.complete(body)

    def complete(self, body: Json) -> None:
        s = self.stand_in
        rollout = "prompt_logprobs" not in body and body["max_tokens"] != 2  # neither a score nor the first questions
        kind = s.breaks("score") if "prompt_logprobs" in body else ""
        with s.held:
            if rollout:
                s.bodies.append(body)
                kind = next((fault.kind for fault in s.faults if fault.times), "")
                if fault := next((fault for fault in s.faults if fault.times), None):
                    fault.times -= 1
        if kind == "503":
            self.answer(503, {"error": {"message": "busy"}})
        elif kind == "400":
            self.answer(400, {"error": {"message": "top_k must be an integer"}})
        elif kind == "reset":
            s.at_work(-1)
            self.connection.close()
        elif kind == "slow":
            s.stop.wait(20)
            s.at_work(-1)
        elif kind == "restart":
            s.start()
            self.answer(*s.complete(body))
        elif kind == "cut":
            status, answer = s.complete(body)
            self.raw(status, json.dumps(answer).encode(), less=7)
        elif kind == "garbled":
            self.raw(200, json.dumps(s.complete(body)[1]).encode()[:-9])
        else:
            status, answer = s.complete(body)
            if kind:
                s.spoil(answer, kind, body["max_tokens"])
            self.answer(status, answer)

    def locked(self) -> bool:
        key = self.stand_in.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.rfile.read(0)
        self.answer(401, {"error": "Unauthorized"})
        return True

    def answer(self, status: int, content: Any) -> None:
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
        self.raw(status, text.encode())

    def raw(self, status: int, content: bytes, less: int = 0) -> None:
        if self.path == "/v1/completions":
            self.stand_in.at_work(-1)  # before who asked can ask for more
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) - less])


class Listening(ThreadingHTTPServer):
    daemon_threads = True
    errors: ClassVar[list[BaseException | None]] = []
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError | ValueError):  # a client that went away, or what a fault closed
            self.errors.append(error)


@contextmanager
def served(stand_in: StandIn, port: int = 0) -> Iterator[str]:
    """Its address, while it listens; port: 0 = any free one."""
    listening = Listening(("127.0.0.1", port), type("Handler", (Handler,), {"stand_in": stand_in}))
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        stand_in.stop.set()
        listening.shutdown()
        thread.join()
        listening.server_close()
        assert not Listening.errors, Listening.errors.pop()
