"""Means and last states of sequences while they grow, so that no single row has to leave the device.

Of each sequence the sums of its states up to its last few positions are kept, in float32:

    S(p) = S(p - 1) + h(p),    S(first position - 1) = 0,    mean = S(last position) / number of positions.

The last few, because only a sequence's end tells which position was its last: an asynchronous step computes one more.
A position that is computed again, as after preemption, is not added again; one that is still held is written over,
because the token that was in flight there may have been another. With pooling ``last``, S(p) = h(p).

Sequences of which more can turn out to be superfluous than is held back (rejected drafts, stop strings, which are
found outside of the engine) are not for this class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from polygraph_hs.capture.layout import runs
from polygraph_hs.spec import ranges

# Rows of a prompt are summed this many at a time, in parallel, and then their sums.
ROWS_OF_A_SUM = 64
# Scratch memory on the device for the float32 rows that are being summed.
SCRATCH_BYTES = 2**26


@dataclass
class Progress:
    """How far the pooling of some sequences is, each attribute int64 ``(n,)`` (or one number).

    Attributes:
        start, stop: positions to pool, ``stop`` exclusive (and larger than any sequence while it grows).
        final: positions below have the token that they will keep, once they have been computed.
        is_mean: whether the states are summed; else the last one is kept.
        low, high: sums are held up to the positions from ``low`` to ``high - 1``, none if they are equal.
        gap_start, gap_stop: positions that were passed over, none if they are equal; of a mean the first such.
    """

    values: np.ndarray

    NAMES = ("start", "stop", "final", "is_mean", "low", "high", "gap_start", "gap_stop")

    def __getattr__(self, name: str) -> np.ndarray:
        return self.values[self.NAMES.index(name)]

    @classmethod
    def of_new(cls, start: int, stop: int, final: int, is_mean: bool) -> Progress:
        return cls(np.array([start, stop, final, is_mean, start, start, 0, 0], dtype=np.int64))


@dataclass(eq=False)
class Pooled:
    """One sequence being pooled.

    Attributes:
        parked: its progress while it has no slot.
        slot: where its sums are on the device, -1 if they are not there.
        sums: while they are on the host, ``(layers, depth, hidden_size)``; their layers; what to wait for before.
    """

    parked: Progress
    slot: int = -1
    sums: tuple[torch.Tensor, tuple[int, ...], object] | None = None


class DevicePooling:
    """Sums of the sequences that are running, in slots on the device.

    Args:
        num_slots: most sequences in a step.
        depth: of how many positions the sums are held for each sequence, the newest ones.
        hidden_size, device: of the model.
        to_host: copies a tensor to the host, and says what to wait for before it is read.
        to_device: copies an array to the device.
    """

    def __init__(
        self,
        num_slots: int,
        depth: int,
        hidden_size: int,
        device: torch.device,
        to_host: Callable[[torch.Tensor], tuple[torch.Tensor, object]] = lambda values: (values, None),
        to_device: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy,
    ):
        self.num_slots = num_slots
        self.depth = depth
        self.hidden_size = hidden_size
        self.device = device
        self.to_host = to_host
        self.to_device = to_device
        self.owners: dict[int, Pooled] = {}
        self.free = list(range(num_slots))
        self.progress = Progress(np.zeros((len(Progress.NAMES), num_slots), dtype=np.int64))
        # The sequences of the step before and their slots, until one of them moves.
        self._known: tuple[Sequence[Pooled], np.ndarray] = ([], np.empty(0))
        self._allocate(())

    def _allocate(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        # One row more than there are sums: the zeros that the first position is added to.
        shape = (len(layers), self.num_slots * self.depth + 1, self.hidden_size)
        self.sums = torch.zeros(shape, dtype=torch.float32, device=self.device)

    def set_layers(self, layers: tuple[int, ...]) -> None:
        """Pool these layers from now on."""
        if layers != self.layers:
            self.park(list(self.owners.values()))
            self._allocate(layers)

    def record(
        self,
        sequences: Sequence[Pooled],
        first_row: np.ndarray,
        first: np.ndarray,
        end: np.ndarray,
        gather: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        """Add a step's rows.

        Args:
            sequences: [n] those in the step.
            first_row: int64 [n] row of each one's first position in the step.
            first, end: int64 [n] its positions in the step, ``end`` exclusive.
            gather: takes int64 row numbers [k] and returns ``(layers, k, hidden_size)`` on the device.
        """
        slots = self._slots(sequences)
        begin, end_of = self._advance(slots, first, end)
        counts = end_of - begin
        # First the sequences with one row each, then those with several.
        single, several = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        chosen = np.concatenate([single, several])
        if len(chosen) == 0:
            return
        base = slots[chosen] * self.depth
        progress = Progress(self.progress.values[:, slots[chosen]])
        added = (progress.is_mean == 1) & (begin[chosen] > progress.start)
        before = np.where(added, base + (begin[chosen] - 1) % self.depth, self.num_slots * self.depth)
        after = base + (end_of[chosen] - 1) % self.depth
        before, after = self.to_device(np.stack([before, after]))
        rows = first_row + begin - first
        sums = self.sums.index_select(1, before)
        if len(single):
            sums[:, : len(single)] += gather(rows[single])
        if len(several):
            sums[:, len(single) :] += self._sum_rows(rows[several], counts[several], gather)
        self.sums.index_copy_(1, after, sums)

    def _advance(self, slots: np.ndarray, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take note of positions that were computed; returns which of them are to be added."""
        now = Progress(self.progress.values[:, slots])
        end = np.minimum(end, now.stop)
        begin = np.maximum(np.maximum(first, now.start), np.minimum(now.high, now.final))
        # The sum that goes before has to be held.
        begin = np.where(now.high > now.start, np.maximum(begin, now.low + 1), begin)
        begin = np.where(now.is_mean == 1, begin, np.maximum(begin, end - 1))
        added = begin < end
        skipped = added & (first > now.high)
        # A mean lacks something from the first gap on; a last state, if it lies in the gap.
        gap = skipped & ((now.is_mean == 0) | (now.gap_start == now.gap_stop))
        now.gap_start[gap], now.gap_stop[gap] = now.high[gap], first[gap]
        alone = skipped | (end - begin > 1)
        now.low[:] = np.where(added, np.where(alone, end - 1, np.maximum(now.low, end - self.depth)), now.low)
        now.high[:] = np.where(added, end, now.high)
        self.progress.values[:, slots] = now.values
        return begin, end

    def _sum_rows(
        self, first_rows: np.ndarray, counts: np.ndarray, gather: Callable[[np.ndarray], torch.Tensor]
    ) -> torch.Tensor:
        """Sums of rows, ``(layers, n, hidden_size)``, for [n] first rows and numbers of rows."""
        num_parts = -(-counts // ROWS_OF_A_SUM)
        start = np.repeat(first_rows, num_parts) + ROWS_OF_A_SUM * runs(np.zeros_like(num_parts), num_parts)
        lengths = np.minimum(ROWS_OF_A_SUM, np.repeat(first_rows + counts, num_parts) - start)
        at_once = max(SCRATCH_BYTES // (max(len(self.layers), 1) * self.hidden_size * 4 * ROWS_OF_A_SUM), 1)
        partial = []
        for number in range(0, len(start), at_once):
            part = slice(number, number + at_once)
            partial.append(self._segment_sums(gather(runs(start[part], lengths[part])), lengths[part]))
        return self._segment_sums(torch.cat(partial, dim=1), num_parts)

    def _segment_sums(self, rows: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
        lengths = self.to_device(counts)
        # Unsafe only means that the lengths are not read back from the device to check that they add up.
        return torch.stack([torch.segment_reduce(layer.float(), "sum", lengths=lengths, unsafe=True) for layer in rows])

    def _slots(self, sequences: Sequence[Pooled]) -> np.ndarray:
        """The slots of a step's sequences, which get one if they have none; others make room for them."""
        if self._known[0] is sequences:
            return self._known[1]
        homeless = [sequence for sequence in sequences if sequence.slot < 0]
        if len(homeless) > len(self.free):
            stay = set(map(id, sequences))
            self.park([sequence for sequence in self.owners.values() if id(sequence) not in stay])
        for sequence in homeless:
            sequence.slot = self.free.pop()
            self.owners[sequence.slot] = sequence
            self.progress.values[:, sequence.slot] = sequence.parked.values
            if sequence.sums is not None:
                self._restore(sequence)
        slots = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
        self._known = (sequences, slots)
        return slots

    def _restore(self, sequence: Pooled) -> None:
        values, layers, ready = sequence.sums
        sequence.sums = None
        if ready is not None:
            ready.synchronize()
        slot = slice(sequence.slot * self.depth, (sequence.slot + 1) * self.depth)
        for number, layer in enumerate(self.layers):
            # A layer that was not tapped when the sequence started is not among the layers of its plan.
            if layer in layers:
                self.sums[number, slot] = values[layers.index(layer)].to(self.device)

    def park(self, sequences: Sequence[Pooled]) -> None:
        """Take sequences that have ended, or wait, off the device: their sums go to the host."""
        there = [sequence for sequence in sequences if sequence.slot >= 0]
        if not there:
            return
        slots = np.array([sequence.slot for sequence in there], dtype=np.int64)
        rows = (slots[:, None] * self.depth + np.arange(self.depth)).ravel()
        values, ready = self.to_host(self.sums.index_select(1, self.to_device(rows)))
        values = values.unflatten(1, (len(there), self.depth))
        for number, sequence in enumerate(there):
            sequence.parked = Progress(self.progress.values[:, sequence.slot].copy())
            sequence.sums = (values[:, number], self.layers, ready)
            self._leave(sequence)

    def _leave(self, sequence: Pooled) -> None:
        del self.owners[sequence.slot]
        self.free.append(sequence.slot)
        sequence.slot = -1
        self._known = ([], np.empty(0))

    def discard(self, sequence: Pooled) -> None:
        """Forget a sequence."""
        sequence.sums = None
        if sequence.slot >= 0:
            self._leave(sequence)

    def missing(self, sequence: Pooled, start: int, stop: int, layers: tuple[int, ...]) -> str | None:
        """Why a sequence that ends before ``stop`` cannot be pooled, or None."""
        now = sequence.parked if sequence.slot < 0 else Progress(self.progress.values[:, sequence.slot])
        first = start if now.is_mean else stop - 1
        gap = (now.high, stop) if now.high < stop else (now.gap_start, now.gap_stop)
        if holes := range(max(gap[0], first), min(gap[1], stop)):
            return f"{len(holes)} of {stop - first} positions never arrived ({ranges(holes)}) for layers {list(layers)}"
        if now.low >= stop:
            return f"{now.high - stop} positions were computed behind its end, more than can be taken back"
        return None

    def collect(self, sequences: Sequence[tuple[Pooled, int, int]], layers: tuple[int, ...], out: torch.Tensor) -> None:
        """Write the pooled states of [n] (sequence, start, stop) into ``out``, ``(len(layers), n, hidden_size)``."""
        there = [number for number, (sequence, _, _) in enumerate(sequences) if sequence.slot >= 0]
        if there:
            slots = np.array([sequences[number][0].slot for number in there], dtype=np.int64)
            starts, stops = (np.array([sequences[number][i] for number in there], dtype=np.int64) for i in (1, 2))
            indices = self.to_device(slots * self.depth + (stops - 1) % self.depth)
            sums = torch.stack([self.sums[self.layers.index(layer)].index_select(0, indices) for layer in layers])
            is_mean = self.progress.is_mean[slots] == 1
            counts = self.to_device(np.where(is_mean, stops - starts, 1).astype(np.float32))
            values, ready = self.to_host((sums / counts[:, None]).to(out.dtype))
            if ready is not None:
                ready.synchronize()
            out[:, there] = values
        for number, (sequence, start, stop) in enumerate(sequences):
            if sequence.slot < 0:
                values, held, ready = sequence.sums
                if ready is not None:
                    ready.synchronize()
                kept = values[[held.index(layer) for layer in layers], (stop - 1) % self.depth]
                out[:, number] = kept / (stop - start if sequence.parked.is_mean else 1)
