"""The images of a model's inputs: their ids become pixels where the model's forward begins.

    batch ──prepare──▶ ids of the vocabulary (targets), inputs with media ids, rotary positions [T, 3]
    inputs [B, L] ──hook on the backbone──▶ placeholder ids, pixels of each image in the order of the rows ──▶ forward

The images of a batch are read and processed by threads, as soon as it is known which of them this rank computes.
Legend: T tokens, B rows of L tokens, M images.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from runner.core.batch import Batch
from runner.core.media import MEDIA_ID, media_runs
from runner.interfaces.media import ImageReader, ProcessedImage, images_of
from runner.model.image_processor import image_token_id
from runner.model.model_parts import has_vision_part, part_finder

THREADS = 4
STAND_IN = 0  # any id of the vocabulary
CACHE_BYTES = 2**30  # of processed images that may be used again: sampled from, then scored, then trained on


class MediaInputs:
    """Replaces media ids in the inputs of a transformers model, `inner`."""

    def __init__(self, inner: Any, reader: ImageReader) -> None:
        self._inner, self._backbone, self._reader = inner, inner.base_model, reader
        self._keywords = inspect.signature(inner.base_model.forward).parameters.keys()
        self._pool, self._lock = ThreadPoolExecutor(THREADS, "images"), Lock()
        self._found: OrderedDict[int, Future[ProcessedImage]] = OrderedDict()
        self._bytes = 0
        self._token_id = image_token_id(inner.config)
        self.has_rotary_grid = hasattr(inner.base_model, "get_rope_index")
        self._had_images = False
        inner.base_model.register_forward_pre_hook(self._replace_inputs, with_kwargs=True)
        inner.base_model.register_forward_hook(self._add_unused_parameters)

    def __deepcopy__(self, memo: object) -> MediaInputs:
        """Itself: a copied model reads the same images."""
        return self

    def images(self, ids: Iterable[int]) -> list[ProcessedImage]:
        """Images by their ids. Raises DataError for one that cannot be read."""
        started = [self._image(one) for one in ids]
        return [one.result() for one in started]

    def _image(self, one: int) -> Future[ProcessedImage]:
        """Read and process an image in another thread, unless that is done."""
        with self._lock:
            if one not in self._found:
                self._found[one] = self._pool.submit(self._load, one)
            self._found.move_to_end(one)
            return self._found[one]

    def _load(self, one: int) -> ProcessedImage:
        made = self._reader.read(one)
        with self._lock:
            self._bytes += _num_bytes(made)
            while self._bytes > CACHE_BYTES and (oldest := next(iter(self._found))) != one:
                future = self._found[oldest]
                if not future.done():
                    break
                del self._found[oldest]
                self._bytes -= 0 if future.exception() else _num_bytes(future.result())
        return made

    def probe_rows(self) -> list[list[int]]:
        """Two rows of a few tokens with one of the images each; none where there are no images."""
        images = self._reader.some_ids(2) if self._reader.is_used else []
        return [[3, 1, *[one] * self._reader.count(one), 4, 1] for one in images]

    def start_reading(self, batch: Batch) -> None:
        """Start to read the images of a batch."""
        ids = batch.structure.tokens["ids"]
        for one in torch.unique_consecutive(ids[ids >= MEDIA_ID]).tolist():
            self._image(one)

    def prepare(self, batch: Batch) -> Batch:
        """The batch with `ids` of the vocabulary, and with its images in `inputs` [T] and `rope` [T, 3]."""
        ids = batch.tokens["ids"]
        if not self._reader.is_used or not bool((batch.structure.tokens["ids"] >= MEDIA_ID).any()):
            return batch
        more = {"inputs": ids, "ids": torch.where(ids >= MEDIA_ID, self._token_id, ids)}
        if self.has_rotary_grid:
            more["rope"] = self._batch_positions(batch.structure).to(ids.device, non_blocking=True)
        return replace(batch, tokens={**batch.tokens, **more})

    def _batch_positions(self, batch: Batch) -> Tensor:
        """Rotary positions [T, 3] of time, height and width; a branch follows the end of its prompt."""
        ids, parents = batch.tokens["ids"].tolist(), batch.tokens["parent"].tolist()
        found = torch.empty(len(ids), 3, dtype=torch.int64)
        start = 0
        for length in batch.rows["lengths"].tolist():
            first = int(found[parents[start]].max()) + 1 if parents[start] >= 0 else 0
            found[start : start + length] = first + self.row_positions(ids[start : start + length])
            start += length
        return found

    def row_positions(self, ids: Sequence[int]) -> Tensor:
        """Rotary positions [L, 3] of one row from 0 on."""
        images = self.images(one for one, _ in media_runs(ids, self._reader.count))
        if not images or not self.has_rotary_grid:
            return torch.arange(len(ids))[:, None].expand(-1, 3)
        row = torch.tensor([ids])
        kinds = (row >= MEDIA_ID).int()
        grids = torch.cat([image.values["image_grid_thw"] for image in images])
        row = row.where(row < MEDIA_ID, self._token_id)
        positions: Tensor = self._backbone.get_rope_index(row, mm_token_type_ids=kinds, image_grid_thw=grids)[0]
        return positions[:, 0].T

    def rotary_shift(self, ids: Sequence[int]) -> int:
        """What is added to the index of a token after these to get its rotary position."""
        if not self.has_rotary_grid or not any(one >= MEDIA_ID for one in ids):
            return 0
        return int(self.row_positions(ids).max()) + 1 - len(ids)

    def _replace_inputs(self, module: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
        """The hook: pixels instead of media ids."""
        ids, self._had_images = keywords.get("input_ids"), False
        has_pixels = any(keywords.get(name) is not None for name in ("pixel_values", "mm_encoder_outputs"))
        if ids is None or has_pixels:  # of a caller that knows no media ids
            return None
        # A placeholder that a policy has written is no image, so the model reads another token in its place. A sampler
        # that has seen no image does so, too: it computes what its trainer does.
        ids = torch.where(ids == self._token_id, STAND_IN, ids)
        keywords = {**keywords, "input_ids": ids}
        # one more token of each row is never an image
        some = self._reader.is_used and ids.shape[1] > 1
        runs = [media_runs(row, self._reader.count) for row in ids.tolist()] if some else []
        if not any(runs):
            return args, keywords
        self._had_images = True
        images = self.images(one for row in runs for one, _ in row)
        more = collate([image.values for image in images], self._keywords)
        kinds = (ids >= MEDIA_ID).long()
        types = dict.fromkeys(self._keywords & {"token_type_ids", "mm_token_type_ids"}, kinds)
        positions = keywords.get("position_ids")
        if self.has_rotary_grid and positions is not None and positions.ndim == 2:
            types["position_ids"] = self._grid_positions(ids, positions, keywords.get("attention_mask"))
        dtype = getattr(module, "media_dtype", None)
        moved = {n: v.to(ids.device, dtype if v.is_floating_point() else None) for n, v in more.items()}
        return args, {**keywords, "input_ids": torch.where(ids >= MEDIA_ID, self._token_id, ids), **types, **moved}

    def _add_unused_parameters(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The hook: without images, trained vision parameters have a gradient of zero, not none.

        So every rank reduces the same gradients, and a step does not depend on how its rows are distributed.
        """
        if self._had_images or not self._reader.is_used or not torch.is_grad_enabled():
            return None
        part_of = part_finder(self._inner)
        unused = [p.sum() for n, p in self._inner.named_parameters() if p.requires_grad and part_of(n) != "language"]
        if unused:
            output.last_hidden_state = output.last_hidden_state + 0.0 * torch.stack(unused).sum()
        return output

    def _grid_positions(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Rotary positions [3, B, L] of whole rows, padded where the mask [B, L] is 0."""
        found = positions[..., None].repeat(1, 1, 3).cpu()
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        for at, row in enumerate(ids):
            found[at, real[at].cpu()] = self.row_positions(row[real[at]].tolist())
        return found.permute(2, 0, 1).to(ids.device)


def media_inputs(inner: Any, tokenizer: Any) -> MediaInputs | None:
    """What replaces images in a model's inputs, one for each model; None for a model of text alone."""
    reader = images_of(tokenizer)
    if reader is None or not has_vision_part(inner) or image_token_id(inner.config) is None:
        return None
    if not hasattr(inner, "media_inputs"):
        inner.media_inputs = MediaInputs(inner, reader)
    return inner.media_inputs


def _num_bytes(image: ProcessedImage) -> int:
    return sum(value.nbytes for value in image.values.values())


def collate(images: Sequence[Any], known: Iterable[str]) -> dict[str, Tensor]:
    """The values of M images as arguments of a forward, padded with zeros to the largest and concatenated."""
    found = {}
    for name in known:
        parts = [image[name] for image in images if name in image]
        if name == "batch_num_images":
            found[name] = _row_counts(torch.cat(parts).tolist())
        elif parts:
            largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
            found[name] = torch.cat([_pad_to(part, largest) for part in parts])
    return found


def _pad_to(part: Tensor, largest: Sequence[int]) -> Tensor:
    if list(part.shape[1:]) == list(largest):
        return part
    edges = [edge for size, most in zip(part.shape[:0:-1], largest[::-1], strict=True) for edge in (0, most - size)]
    return pad(part, edges)


def _row_counts(images: Sequence[int]) -> Tensor:
    """Number of images of each row; images: 1 for one that is alone in its row, 2 for others.

    Neighbors that are not alone count as one row.
    """
    counts: list[int] = []
    for at, one in enumerate(images):
        if one > 1 and at and images[at - 1] > 1:
            counts[-1] += 1
        else:
            counts.append(1)
    return torch.tensor(counts)
