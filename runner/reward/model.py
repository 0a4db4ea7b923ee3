"""A trained reward model, run in this process without gradient.

    conversation ─▶ its own template ─▶ its own ids ─┬─▶ sorted by length, in batches ─▶ one score per answer
    plain text ─▶ ids of prompt and answer ──────────┘

Legend: B answers of a batch, S tokens of the longest of them, H the model's width. The score of a decoder is read at
one token of the row, `reward.score_position`:

    … assistant: 4 <|im_end|> ⏎
                       │      └─ last_token: the last that is no padding, as Transformers, TRL and verl do
                       └─ end_of_turn: without the blanks behind it, where `algorithm=rm` trains
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.hub import cached_file

from runner.core.errors import EnvironmentProblem, SecurityError
from runner.core.progress_bars import no_load_report, no_progress_bar
from runner.core.untrusted_text import parse_json
from runner.interfaces import Completion, Decide
from runner.interfaces.model import REWARD_MODEL_FILE
from runner.interfaces.rewards import GroupScores, ScoringFailure, ScoringFailures, UnscorableError
from runner.reward.config import ModelRewardConfig
from runner.reward.preflight import is_adapter, refuse_language_model

Position = Literal["end_of_turn", "last_token"]
EncodeConversation = Callable[[Sequence[Mapping[str, Any]]], list[int]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """The ids of a row, and the index of the token where its score is read.

    encode: a conversation by the reward model's template, None without one; shares_ids: each id of the policy's means
    the same to the reward model; padding: the id that transformers skips at the end, None without one
    """

    own: Any
    encode: EncodeConversation | None
    shares_ids: bool
    position: Position
    padding: int | None

    def row(self, completion: Completion) -> tuple[list[int], int]:
        """Raises UnscorableError where the template fails, or no token is left."""
        is_chat = completion.prompt.messages is not None and self.encode is not None
        ids = self._conversation(completion) if is_chat else self._plain(completion)
        if not ids:
            raise UnscorableError("empty", "prompt and completion have no token")
        return ids, self._score_index(ids, is_chat)

    def _score_index(self, ids: Sequence[int], is_chat: bool) -> int:
        last = len(ids) - 1
        if self.position == "last_token":
            return next((at for at in range(last, -1, -1) if ids[at] != self.padding), 0)
        blank = (at for at in range(last, -1, -1) if not is_chat or self.own.decode(ids[at]).strip())
        return next(blank, last)

    def _conversation(self, completion: Completion) -> list[int]:
        assert self.encode is not None and completion.prompt.messages is not None
        answer = {"role": "assistant", "content": completion.text}
        messages = [dict(m) for m in completion.messages or (*completion.prompt.messages, answer)]
        try:
            return self.encode(messages)
        except Exception as error:  # a template is a foreign program and may fail in any way
            why = f"the reward model's chat template fails on the conversation: {type(error).__name__}: {error}"
            raise UnscorableError("chat template failed", why) from error

    def _plain(self, completion: Completion) -> list[int]:
        """Prompt and answer, with the end token of an answer that is not cut off, in both vocabularies."""
        if self.shares_ids:
            return [*completion.prompt.ids, *completion.ids]
        end = [self.own.eos_token_id] if completion.finish == "stop" and self.own.eos_token_id is not None else []
        return [*self.own(completion.prompt.text + completion.text)["input_ids"], *end]


class ModelReward:
    """Scores answers with a sequence classifier."""

    def __init__(
        self, module: Any, encoder: RowEncoder, device: torch.device, batch_size: int, faults: ScoringFailures
    ) -> None:
        self._module, self._encoder, self._device = module, encoder, device
        self._batch_size, self._faults = batch_size, faults
        self._longest = getattr(module.config.get_text_config(), "max_position_embeddings", None)

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float | None]]:
        """One list per group; None for what is longer than the model's positions or cannot be written for it."""
        rows = [[self._row(completion) for completion in group] for group in groups]
        known = [row for group in rows for row in group if not isinstance(row, ScoringFailure)]
        scores = iter(self._scores(known))
        return [
            self._faults.record_group(
                GroupScores(
                    [None if isinstance(row, ScoringFailure) else next(scores) for row in group],
                    tuple(row for row in group if isinstance(row, ScoringFailure)),
                )
            )
            for group in rows
        ]

    def close(self) -> None:
        """Say what could not be scored."""
        self._faults.close()

    def _row(self, completion: Completion) -> tuple[list[int], int] | ScoringFailure:
        """The ids to score and where the score is, or why there are none."""
        try:
            ids, at = self._encoder.row(completion)
        except UnscorableError as reason:
            return ScoringFailure(reason.kind, str(reason))
        if self._longest is not None and len(ids) > self._longest:
            return ScoringFailure("too long", f"{len(ids)} tokens, above the reward model's {self._longest} positions")
        return ids, at

    def _scores(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[float]:
        """A score for each row, in their order."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        found: dict[int, float] = {}
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            found |= zip(chosen, self._batch([rows[i] for i in chosen]), strict=True)
        return [found[i] for i in range(len(rows))]

    @torch.no_grad()
    def _batch(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[float]:
        """Scores of B rows, padded on the right to [B, S]."""
        padding = self._encoder.padding or 0
        lengths = torch.tensor([len(row) for row, _ in rows], device=self._device)
        places = torch.tensor([at for _, at in rows], device=self._device)
        width = max(len(row) for row, _ in rows)
        ids = torch.tensor([[*row, *[padding] * (width - len(row))] for row, _ in rows], device=self._device)
        mask = (torch.arange(width, device=self._device) < lengths[:, None]).long()
        if (head := getattr(self._module, "score", None)) is None:  # an encoder: it reads its first token
            scores: Tensor = self._module(input_ids=ids, attention_mask=mask).logits[:, 0]
        else:
            # [B, S, H], then [B, H]
            hidden = self._module.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            read = hidden[torch.arange(len(rows), device=self._device), places]
            bias = None if head.bias is None else head.bias.float()
            scores = torch.nn.functional.linear(read.float(), head.weight.float(), bias)[:, 0]
        return [float(score) for score in scores.float().cpu()]


def build(
    config: ModelRewardConfig,
    *,
    device: torch.device,
    tokenizer: Any,
    decide: Decide,
    fit: Callable[[nn.Module], None],
    make_encoder: Callable[[Any], EncodeConversation],
    **_: Any,
) -> ModelReward:
    """Load the model. `tokenizer` is the policy's; make_encoder: of a tokenizer with a chat template.

    Raises EnvironmentProblem if it cannot be loaded or is no reward model, SecurityError if it is a pickle or code.
    """
    config.preflight()
    module, own = _load_module(config)
    shares_ids = tokenizer.get_vocab().items() <= own.get_vocab().items()
    if not own.chat_template and not shares_ids:
        got = "tokenized again with its own tokenizer, as plain text"
        decide("reward.path", "the policy's tokens", got, "its vocabulary is different, and it has no chat template")
    pad = module.config.get_text_config().pad_token_id
    encoder = RowEncoder(
        own,
        make_encoder(own) if own.chat_template else None,
        shares_ids,
        _score_position(config, module, decide),
        own.pad_token_id if pad is None else pad,
    )
    faults = ScoringFailures("reward=model", config.max_failures, "lower data.max_length or use another reward model")
    module = module.to(device).eval().requires_grad_(False)
    fit(module)
    return ModelReward(module, encoder, device, config.batch_size, faults)


def _score_position(config: ModelRewardConfig, module: nn.Module, decide: Decide) -> Position:
    """Where the model's score is: as set, as stored beside the model, or as others read it.

    An encoder ignores it. Raises EnvironmentProblem where it is set for one, or cannot be read.
    """
    if not hasattr(module, "score"):
        if config.score_position is None:
            return "last_token"
        text = f"reward.score_position={config.score_position}: {type(module).__name__} chooses the token itself"
        raise EnvironmentProblem(f"{text}\n  leave reward.score_position out")
    if config.score_position is not None:
        return config.score_position
    path = os.path.expanduser(config.path)
    found = cached_file(
        path,
        REWARD_MODEL_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        decide.record_fact(
            "reward.score_position", "last_token", f"no {REWARD_MODEL_FILE} beside the model: as Transformers reads it"
        )
        return "last_token"
    try:
        stored = ModelRewardConfig(path=config.path, **parse_json(Path(found).read_bytes())).score_position
    except (OSError, ValueError, TypeError) as error:
        raise EnvironmentProblem(f"{found} cannot be read: {error}\n  set reward.score_position") from error
    decide.record_fact("reward.score_position", str(stored), f"of {REWARD_MODEL_FILE} beside the model")
    return stored or "last_token"


def _load_module(config: ModelRewardConfig) -> tuple[Any, Any]:
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"  # or transformers requests a conversion of pickles from the hub
    path, dtype = os.path.expanduser(config.path), DTYPES[config.dtype or "float32"]
    adapted = is_adapter(path)
    try:
        if not adapted:
            _refuse_other_heads(path)
        with no_progress_bar(), no_load_report():
            module, info = _load_adapted(path) if adapted else _load_weights(path, dtype=dtype)
        own = AutoTokenizer.from_pretrained(path)
    except (OSError, ImportError, ValueError) as error:
        raise _load_error(path, error) from error
    module = module.to(dtype)
    if absent := sorted(map(str, [*info["missing_keys"], *info.get("mismatched_keys", ())])):
        raise EnvironmentProblem(
            f"reward.path={path} lacks {len(absent)} of the weights of a reward model, e.g. {absent[0]}\n"
            "  set reward.path to a trained sequence classifier, not a language model"
        )
    rows = module.get_input_embeddings().num_embeddings
    if len(own) < rows / 10:  # transformers makes up an empty tokenizer where it finds none
        raise EnvironmentProblem(f"reward.path={path}: the tokenizer has {len(own)} ids, the embedding {rows} rows")
    return module, own


def _refuse_other_heads(path: str) -> None:
    described = AutoConfig.from_pretrained(path)
    refuse_language_model(path, described.architectures)
    if (labels := described.num_labels) != 1:
        raise EnvironmentProblem(
            f"reward.path={path} has {labels} labels; a reward model is a sequence classifier with num_labels=1"
        )


def _load_weights(path: str, **options: Any) -> tuple[Any, Any]:
    """The sequence classifier at `path`, and which of its weights are missing there."""
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(
        path, use_safetensors=True, output_loading_info=True, **options
    )
    return loaded[0], loaded[1]


def _load_adapted(path: str) -> tuple[Any, Any]:
    """The same of an adapter and its base, merged in float32; the adapter holds the head."""
    import peft

    adapter = peft.PeftConfig.from_pretrained(path)
    base, revision = str(adapter.base_model_name_or_path), adapter.revision
    module, info = _load_weights(base, revision=revision, num_labels=1, dtype=torch.float32)
    info["missing_keys"] = {name for name in info["missing_keys"] if not name.startswith(("score.", "classifier."))}
    with warnings.catch_warnings(action="ignore"):  # of peft's own deprecated calls
        return peft.PeftModel.from_pretrained(module, path).merge_and_unload(), info


def _load_error(path: str, error: Exception) -> Exception:
    first = " ".join(str(error).strip().splitlines()[:2])
    if "trust_remote_code" in first or "custom code" in first:
        return SecurityError(f"reward.path={path} contains Python code, which is not executed")
    return EnvironmentProblem(
        f"reward.path={path} cannot be loaded: {first}\n  is it a folder with model and tokenizer?"
    )
