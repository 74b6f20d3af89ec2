"""Which rows a step gets: the same ones however many processes share the batch, and however often a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler


class SeededLengthGroupedSampler(LengthGroupedSampler):
    """Rows of similar length together, in an order that is a function of `seed` and the epoch alone.

    The stock sampler draws from the process's global random numbers: a run resumed in its second epoch would get
    another order than the interrupted one.

    Args:
        batch_size: rows of a step, over all processes and micro-batches. lengths: of all rows. seed: of the order.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int):
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def set_sampler_epoch(loader: DataLoader, epoch: int) -> None:
    """Tells the sampler at the bottom of a prepared loader the epoch.

    accelerate's own `set_epoch` does not reach it through the two wrappers that a resumed run on several processes
    has: `skip_first_batches` around `BatchSamplerShard`.
    """
    sampler = loader.batch_sampler
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    sampler = getattr(sampler, "sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def drop_repeated_rows(
    batch: dict[str, torch.Tensor], rows: int, process: int, processes: int, batch_size: int
) -> dict[str, torch.Tensor]:
    """The last batch of an epoch without the rows that fill it up.

    Every process gets a full batch, so accelerate fills the last ones up with rows from the epoch's beginning. A
    process that would be left without a row keeps one, with nothing supervised: all take part in every step.

    Args:
        batch: tensors `[batch_size, s]` of this process. rows: of the data set. process: the index of this process.
    """
    rest = rows % (processes * batch_size)
    if processes == 1 or rest == 0:
        return batch
    real = min(max(rest - process * batch_size, 0), batch_size)
    if real == batch_size:
        return batch
    batch = {name: value[: max(real, 1)] for name, value in batch.items()}
    if real == 0:
        batch["labels"] = torch.full_like(batch["labels"], -100)
    return batch


__all__ = ["SeededLengthGroupedSampler", "drop_repeated_rows", "set_sampler_epoch"]
