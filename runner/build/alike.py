"""That all ranks of a job begin with the same: each does its share of what it takes to be everyone's, unasked."""

from __future__ import annotations

from runner.errors import CheckpointError, DataError
from runner.protocols import Data, Peers


def refuse_different_data(data: Data, everyone: Peers) -> None:
    """Raise DataError, on all ranks, where one has read other rows or has another tokenizer."""
    ranks = everyone.gather(data.fingerprint)
    if others := [rank for rank, found in enumerate(ranks) if found != ranks[0]]:
        raise DataError(
            f"{_named(others)} not the data of rank 0, or tokenised otherwise\n"
            "  give all machines the same files, and the same versions of tokenizer and libraries"
        )


def refuse_different_steps(first: int, everyone: Peers) -> None:
    """Raise CheckpointError, on all ranks, where they would not go on from the same checkpoint."""
    ranks = everyone.gather(first)
    if len(set(ranks)) > 1:
        raise CheckpointError(
            f"the newest whole checkpoint is not the same for all ranks: of steps {', '.join(map(str, ranks))}\n"
            "  give all machines the same run folder, and mend what cannot be read: run.log and ranks/*.log say it"
        )


def _named(ranks: list[int]) -> str:
    """rank 3 has, ranks 2, 3 have"""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'have' if len(ranks) > 1 else 'has'}"
