"""The sampler whose answers a vLLM engine writes.

    requests ──prompts, a seed each──▶ engine ──ids, log-probabilities of the sampled distribution──▶ rollouts

A request's tokens are a function of weights, prompt and seed up to rounding, which depends on what else is in work.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from runner.core.errors import SamplerError, TrainingDiverged
from runner.interfaces import ModelLimits, Request, Rollout
from runner.sampler.config import VllmSamplerConfig
from runner.sampler.sampling import StopCriteria, answer_limit, check_token_ids
from runner.sampler.vllm.arguments import reports_raw_logprobs
from runner.sampler.vllm.engine import VllmEngine
from runner.sampler.vllm.images import check_prompt_ids, vllm_prompt


class VllmSampler:
    """Samples rollouts from an engine with the weights of `load`.

    `scratch`: its folder, removed at the end.
    """

    def __init__(
        self,
        config: VllmSamplerConfig,
        engine: VllmEngine,
        bounds: ModelLimits,
        tokenizer: Any,
        *,
        longest: int,
        adapters: LoraAdapters | None,
        scratch: Path,
    ) -> None:
        """Raises SpecError for ids outside the vocabulary."""
        check_token_ids(config, bounds.vocab_size)
        self._config, self._engine, self._adapters, self._scratch = config, engine, adapters, scratch
        self._ends = sorted(bounds.stop_token_ids | set(config.stop_token_ids))
        self._stops = StopCriteria(tokenizer, frozenset(self._ends), config.stop)
        self._tokenizer, self._vocabulary, self.max_model_len = tokenizer, bounds.vocab_size, longest
        self._has_raw_logprobs = reports_raw_logprobs(config)
        self.temperature, self.max_new_tokens = config.temperature, config.max_new_tokens
        self._version = 0
        self._tokens, self._drawing_s, self._loading_s = 0, 0.0, 0.0

    def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Hold `weights` and call them `version`: under the names of a model on the hub, and always complete.

        Of weights that say what `changed` since the last ones, that alone is copied; all, where this version is loaded
        once more, as something of it went wrong. Raises ValueError for None (an engine shares nobody's), else as
        `VllmEngine.load`.
        """
        if weights is None:
            raise ValueError("a vLLM engine has its own weights")
        begun = time.perf_counter()
        changed: frozenset[str] | None = getattr(weights, "changed", None) if version != self._version else None
        names = [*weights] if self._adapters is None else [name for name in weights if not is_adapter_tensor(name)]
        self._engine.load(weights, names, changed)
        if self._adapters is not None:
            self._adapters.load({name: weights[name] for name in weights if is_adapter_tensor(name)})
        self._version = version
        self._loading_s += time.perf_counter() - begun

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout per request, in their order.

        raw_logprobs are None where the engine cannot report them. Raises ValueError for an empty prompt; DataError for
        a prompt that leaves no room for its answer, TrainingDiverged if logits are not finite, SamplerError if the
        engine is gone or answers what cannot be, EnvironmentProblem if it expands images otherwise.
        """
        limits = [self._limit(request) for request in requests]
        begun = time.perf_counter()
        params = [self._params(request, limit) for request, limit in zip(requests, limits, strict=True)]
        outputs = self._generate([request.prompt for request in requests], params)
        rollouts = [
            self._rollout(request, limit, output.outputs[0])
            for request, limit, output in zip(requests, limits, outputs, strict=True)
        ]
        self._drawing_s += time.perf_counter() - begun
        self._tokens += sum(len(rollout.ids) for rollout in rollouts)
        return rollouts

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """See `Sampler`. Raises ValueError for a row that is empty or longer than the maximum minus one."""
        from vllm import SamplingParams

        for row in rows:
            if not 0 < len(row) < self.max_model_len:
                raise ValueError(f"cannot score {len(row)} tokens, only 1 to {self.max_model_len - 1}")
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        found = self._generate(rows, params)
        return [[_prompt_logprobs(row, output.prompt_logprobs) for row, output in zip(rows, found, strict=True)]]

    def pop_metrics(self) -> dict[str, float]:
        """Since the last call: sampled tokens per second, seconds of loading."""
        found = {"load_s": self._loading_s}
        if self._drawing_s:
            found["tokens_per_s"] = self._tokens / self._drawing_s
        self._tokens, self._drawing_s, self._loading_s = 0, 0.0, 0.0
        return found

    def release_memory(self) -> None:
        """Let the engine sleep."""
        self._engine.release()

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _generate(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        made = {ids: vllm_prompt(ids, self._tokenizer, self._version) for ids in dict.fromkeys(map(tuple, prompts))}
        given = [made[tuple(ids)] for ids in prompts]
        found = self._engine.generate(given, params, None if self._adapters is None else self._adapters.request)
        for ids, output in zip(prompts, found, strict=True):
            check_prompt_ids(ids, output.prompt_token_ids, self._tokenizer)
        return found

    def _limit(self, request: Request) -> int:
        if not request.prompt:
            raise ValueError("an empty prompt")
        return answer_limit(request, self.max_new_tokens, (self.max_model_len, "sampler.max_model_len"))

    def _params(self, request: Request, limit: int) -> Any:
        from vllm import SamplingParams

        config = self._config
        return SamplingParams(
            temperature=config.temperature,
            top_k=config.top_k or 0,
            top_p=config.top_p,
            min_p=config.min_p,
            seed=request.seed % 2**63,
            max_tokens=limit,
            logprobs=0,
            ignore_eos=True,  # which ids end an answer is said here, and not read from a file
            stop_token_ids=self._ends,
            stop=list(config.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(config.stop),
        )

    def _rollout(self, request: Request, limit: int, drawn: Any) -> Rollout:
        ids = [int(token) for token in drawn.token_ids]
        if not ids or not 0 <= min(ids) <= max(ids) < self._vocabulary or drawn.finish_reason not in ("stop", "length"):
            raise SamplerError(f"vLLM ended a completion of {len(ids)} tokens by {drawn.finish_reason}; ids {ids[:5]}")
        count, finish = self._stops.first_stop(ids, limit) or (len(ids), drawn.finish_reason)
        logprobs = [drawn.logprobs[at][ids[at]].logprob for at in range(count)]
        if not math.isfinite(sum(logprobs)):
            raise TrainingDiverged("the policy's logits are not finite, so nothing can be sampled; lower optimizer.lr")
        raw = logprobs if request.raw and self._has_raw_logprobs else None
        return Rollout(ids[:count], logprobs, raw, self._version, finish)


def _prompt_logprobs(row: Sequence[int], found: Sequence[Mapping[int, Any] | None]) -> list[float]:
    return [float(at[token].logprob) for token, at in zip(row[1:], found[1:], strict=True) if at is not None]


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARTS = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_embedding_B")


def is_adapter_tensor(name: str) -> bool:
    """Whether a tensor has the name of an adapter's, and not of a model's."""
    return any(part in name for part in PARTS)


class LoraAdapters:
    """Folders below `room`, with the config that the adapter has in `source`."""

    def __init__(self, source: Path, room: Path) -> None:
        self._config, self._room, self._count = (source / CONFIG).read_text(), room, 0
        self.request: Any = None  # vLLM's, for the newest

    @property
    def rank(self) -> int:
        """The largest of its matrices' ranks."""
        config = json.loads(self._config)
        return max(config["r"], *config.get("rank_pattern", {}).values(), 0)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sample the next answers with these tensors. vLLM reads the folder at the first request that uses it."""
        from vllm.lora.request import LoRARequest

        self._count += 1  # a number of its own for each: vLLM keeps what it has read under it, and its cache too
        folder = self._room / f"adapter-{self._count}"
        folder.mkdir()
        (folder / CONFIG).write_text(self._config)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
        self.request = LoRARequest(f"adapter-{self._count}", self._count, str(folder))
        shutil.rmtree(self._room / f"adapter-{self._count - 1}", ignore_errors=True)
