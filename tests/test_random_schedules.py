"""A search for schedules under which layout, recorder or delivery keep too little, too much or the wrong rows.

Requests of random lengths and plans run through random steps: prefill chunks of any size, a KV cache in whose blocks
prefixes are found again, drafts of which some are rejected, preemption and recomputation, requests in any order,
requests that nobody captures, padding rows, steps too far, aborts, collection at any time, steps that are lost. What
must come out is a plain dictionary.
"""

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import expected_positions, parcel_of

from polygraph_hs.capture.delivery import SegmentPool, open_group
from polygraph_hs.capture.layout import read_layout
from polygraph_hs.capture.pooling import DevicePooling
from polygraph_hs.capture.prefixes import CachedPrefixes
from polygraph_hs.capture.recorder import Recorder
from polygraph_hs.spec import POOLINGS, TOKENS, CapturePlan

EXAMPLES = int(os.environ.get("POLYGRAPH_HS_EXAMPLES", "200"))
LAYERS = (1, 4, 6)
# Most requests in a step.
MAX_RUNNING = 4


@dataclass
class Sequence:
    """A request on the simulated engine.

    Attributes:
        family, shared: its first ``shared`` tokens are those of every sequence of the family.
        borrows: whether it may read the prefix cache although its prompt's states are asked for.
        poolable: whether it may be pooled on the device.
        computed: positions computed, whose tokens are final; ``furthest`` before any preemption.
        blocks: of the KV cache, in the order of its positions.
    """

    req_id: str
    plan: CapturePlan | None
    prompt_length: int
    num_generated: int
    family: int
    shared: int
    borrows: bool
    poolable: bool
    computed: int = 0
    furthest: int = 0
    state: str = "new"
    extra_steps: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return f"key of {self.req_id}", 0

    @property
    def last(self) -> int:
        """One past the last position that is fed to the model."""
        return self.prompt_length + self.num_generated - 1

    @property
    def finished(self) -> bool:
        return self.computed >= self.last

    @property
    def known(self) -> int:
        """Tokens known before the next step."""
        return min(max(self.prompt_length, self.computed + 1), self.last)

    def token(self, position: int) -> tuple[str, int]:
        return (f"9{self.family}" if position < self.shared else self.req_id), position

    def prefix(self, length: int) -> tuple:
        """Names a prefix in the cache: its tokens, and for sequences that borrow the salt of their call."""
        return self.borrows, tuple(self.token(position) for position in range(length))

    def value(self, position: int, layer: int) -> list[float]:
        """The state at a position: the same for all who share the tokens up to there."""
        who, _ = self.token(position)
        value = 1000 * int(who) + position + layer / 10
        return [value, -value]


REJECTED = [-1.0, -1.0]


class Blocks:
    """A KV cache: blocks are handed out, found again by the tokens before their end, and written over."""

    def __init__(self, count: int, size: int):
        self.size = size
        self.free = list(range(count))
        self.users = [0] * count
        self.found: dict[tuple, int] = {}
        self.names: dict[int, tuple] = {}
        self.writer: dict[int, Sequence] = {}

    def hit(self, sequence: Sequence, limit: int) -> int:
        """Give a sequence the cached blocks of its first ``limit`` tokens; returns how many tokens they hold."""
        while (len(sequence.blocks) + 1) * self.size <= limit:
            block = self.found.get(sequence.prefix((len(sequence.blocks) + 1) * self.size))
            if block is None:
                break
            if self.users[block] == 0:
                self.free.remove(block)
            self.users[block] += 1
            sequence.blocks.append(block)
        return len(sequence.blocks) * self.size

    def grow(self, sequence: Sequence, length: int) -> list[int] | None:
        """Blocks for ``length`` tokens: those that are new, or None if there are not enough."""
        missing = -(-length // self.size) - len(sequence.blocks)
        if missing > len(self.free):
            return None
        new = [self.free.pop(0) for _ in range(max(missing, 0))]
        for block in new:
            self.users[block] = 1
            self.writer[block] = sequence
            if block in self.names:
                del self.found[self.names.pop(block)]
        sequence.blocks += new
        return new

    def keep(self, sequence: Sequence, length: int) -> None:
        """Let others find the full blocks of the first ``length`` tokens."""
        for number, block in enumerate(sequence.blocks[: length // self.size]):
            name = sequence.prefix((number + 1) * self.size)
            if name not in self.found and block not in self.names:
                self.found[name], self.names[block] = block, name

    def release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)
        sequence.blocks = []


class Simulation:
    """One worker for each pipeline stage, and the dictionary of what has been seen."""

    def __init__(self, draw):
        self.draw = draw
        self.runner_version = draw(st.sampled_from(["V1", "V2"]))
        self.drafting, self.preempting = self.chance(40), self.chance(50)
        # A lost step is searched for without drafts: a rejected draft's row may stand where a lost row belongs.
        self.losing = not self.drafting and self.chance(20)
        split = self.integer(0, 6)
        stages = [[layer for layer in LAYERS if layer <= split], [layer for layer in LAYERS if layer > split]]
        size = self.integer(1, 4)
        self.stages = [
            (tuple(layers), Recorder(pooling=self.pooling()), CachedPrefixes(1, size)) for layers in stages if layers
        ]
        self.pool = SegmentPool()
        self.blocks = Blocks(self.integer(2, 10) + -(-20 // size), size)
        # By (request, position): whether the row that was seen last is the final token's.
        self.seen: dict[tuple[str, int], bool] = {}
        # By (request, position): who computed what the cache had there.
        self.lent: dict[tuple[str, int], str] = {}
        # Requests of steps that were lost.
        self.lossy: set[str] = set()
        self.sequences = [self.sequence(str(number)) for number in range(1, self.integer(1, 6) + 1)]
        self.waiting = list(self.sequences)
        self.ended: list[Sequence] = []
        self.finished_req_ids: set[str] = set()

    @staticmethod
    def pooling() -> DevicePooling:
        """Pools as many sequences as a step holds, and takes back as many steps as are too many here."""
        return DevicePooling(MAX_RUNNING, depth=3, hidden_size=2, device=torch.device("cpu"))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) < percent

    def sequence(self, req_id: str) -> Sequence:
        plan = None
        if not self.chance(15):
            layers = self.draw(st.lists(st.sampled_from(LAYERS), min_size=1, unique=True))
            plan = CapturePlan(
                tuple(sorted(layers)), self.draw(st.sampled_from(TOKENS)), self.draw(st.sampled_from(POOLINGS))
            )
        whole = plan is not None and plan.needs_whole_prompt()
        borrows = whole and not self.chance(30)
        return Sequence(
            req_id,
            plan,
            prompt_length=self.integer(1, 10),
            num_generated=self.integer(1, 7),
            family=self.integer(0, 1),
            shared=self.integer(0, 12),
            borrows=borrows,
            poolable=not self.drafting and not self.chance(20),
        )

    def run(self) -> None:
        for _ in range(300):
            self.step()
            # A call's borrowing requests end together; others whenever they are done, and some are aborted.
            done = [s for s in self.waiting if s.finished and s.extra_steps == 0]
            borrowing = [s for s in self.waiting if s.borrows]
            if borrowing and all(s in done for s in borrowing):
                self.end(borrowing, collect=True)
            for sequence in [s for s in done if not s.borrows]:
                if self.chance(60):
                    self.end([sequence], collect=not self.chance(10))
            if self.waiting and self.chance(2):
                chosen = self.waiting[self.integer(0, len(self.waiting) - 1)]
                self.end([s for s in self.waiting if s.borrows] if chosen.borrows else [chosen], collect=False)
            if not self.waiting:
                break
        while self.waiting:
            self.end([self.waiting[0]], collect=self.waiting[0].finished and not self.waiting[0].borrows)
        for _, recorder, _ in self.stages:
            assert (recorder.chunks, recorder.requests, recorder.by_key) == ([], {}, {})

    def step(self) -> None:
        # A sequence that was collected or aborted can still be in a step that was scheduled before.
        candidates = [*self.waiting, *(s for s in self.ended if s.extra_steps > 0)]
        output = SimpleNamespace(
            finished_req_ids=self.finished_req_ids,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
        )
        self.finished_req_ids = set()
        chosen: list[Sequence] = []
        rows: list[tuple[Sequence, int, bool]] = []
        query_start, first_position = [0], []
        for sequence in self.draw(st.permutations(candidates)):
            if len(chosen) == MAX_RUNNING or not self.chance(75):
                continue
            if self.preempting and sequence.state == "running" and not sequence.finished and self.chance(12):
                self.blocks.release(sequence)
                sequence.state, sequence.computed = "preempted", 0
            count = self.schedule(sequence, output)
            if count == 0:
                continue
            chosen.append(sequence)
            first = sequence.computed
            final = count
            if sequence.finished:
                sequence.extra_steps = max(sequence.extra_steps - 1, 0)
            else:
                if self.drafting and first >= sequence.prompt_length - 1:
                    final = self.integer(1, min(count, sequence.last - first))
                sequence.computed += final
                sequence.furthest = max(sequence.furthest, sequence.computed)
                if sequence.finished and self.chance(30):
                    sequence.extra_steps = self.integer(1, 2)
            rows += [(sequence, first + i, i < final) for i in range(count)]
            query_start.append(len(rows))
            first_position.append(first)
        for _, recorder, prefixes in self.stages:
            recorder.finish(output.finished_req_ids)
            for new in output.scheduled_new_reqs:
                sequence = next(s for s in self.sequences if s.req_id == new.req_id)
                if sequence.plan is not None and sequence not in self.ended:
                    recorder.add_request(
                        sequence.req_id,
                        sequence.key,
                        sequence.plan,
                        sequence.prompt_length,
                        sequence.borrows,
                        sequence.poolable,
                    )
            prefixes.follow(output, recorder)
        if not rows:
            return
        if self.losing and self.chance(15):
            self.lossy.update(sequence.req_id for sequence in chosen)
            return
        self.seen.update({(sequence.req_id, position): final for sequence, position, final in rows})
        layout = read_layout(self.runner([s.req_id for s in chosen], query_start, first_position))
        assert layout.num_tokens == len(rows)
        for layers, recorder, _ in self.stages:
            recorder.record(layout, layers, lambda indices, layers=layers: self.gather(rows, layers, indices))

    def schedule(self, sequence: Sequence, output: SimpleNamespace) -> int:
        """Put a sequence into the step; returns its number of rows, 0 if the cache has no room for it."""
        starts = sequence.state != "running"
        if starts:
            # The last token that is known is always computed again, to sample the next one from.
            known = max(sequence.prompt_length, sequence.furthest + 1)
            sequence.computed = self.blocks.hit(sequence, min(known, sequence.last) - 1)
        if sequence.finished:
            count = 1
        elif self.drafting and sequence.computed >= sequence.prompt_length - 1:
            count = self.integer(1, 4)
        else:
            count = self.integer(1, sequence.known - sequence.computed)
        first = sequence.computed
        # As with drafts, room can be given for more tokens than the step computes.
        new_blocks = self.blocks.grow(sequence, first + count + self.integer(0, 2))
        if new_blocks is None:
            if starts:
                self.blocks.release(sequence)
                sequence.computed = 0
            return 0
        if starts:
            for position in range(first):
                writer = self.blocks.writer[sequence.blocks[position // self.blocks.size]]
                self.lent[sequence.req_id, position] = writer.req_id
        self.blocks.keep(sequence, min(first + count, sequence.known))
        resumed = sequence.state == "preempted"
        if sequence.state == "new" or (resumed and self.runner_version == "V2"):
            output.scheduled_new_reqs.append(
                SimpleNamespace(
                    req_id=sequence.req_id, block_ids=([-1], list(sequence.blocks)), num_computed_tokens=first
                )
            )
        else:
            cached = output.scheduled_cached_reqs
            given = list(sequence.blocks) if resumed else new_blocks
            cached.req_ids.append(sequence.req_id)
            cached.new_block_ids.append(([-1], given) if given else None)
            cached.num_computed_tokens.append(first)
            if resumed:
                cached.resumed_req_ids.add(sequence.req_id)
        sequence.state = "running"
        return count

    def runner(self, req_ids: list[str], query_start: list[int], first_position: list[int]) -> SimpleNamespace:
        """The attributes of vLLM's model runners that hold a step's layout, padded as vLLM pads them."""
        num_reqs, padding = len(req_ids), self.integer(0, 3)
        padded_start = np.array(query_start + [query_start[-1]] * padding, dtype=np.int32)
        counts = np.diff(query_start)
        positions = np.concatenate([np.arange(f, f + c) for f, c in zip(first_position, counts, strict=True)])
        positions = torch.from_numpy(np.concatenate([positions, np.zeros(padding, dtype=np.int64)]))
        # With drafts in flight the host's counts are upper bounds.
        host = np.array(first_position) + (self.integer(0, 3) if self.drafting else 0)
        host = np.concatenate([host, np.full(padding, 77)]).astype(np.int32)
        if self.runner_version == "V1":
            batch = SimpleNamespace(
                num_reqs=num_reqs, req_ids=req_ids + ["left over"] * padding, num_computed_tokens_cpu=host
            )
            return SimpleNamespace(
                input_batch=batch,
                query_start_loc=SimpleNamespace(np=padded_start),
                use_async_spec_decode=self.drafting,
                positions=positions,
            )
        batch = SimpleNamespace(
            num_reqs=num_reqs,
            req_ids=req_ids,
            query_start_loc_np=padded_start,
            query_start_loc=torch.from_numpy(padded_start),
            num_computed_tokens_np=host,
            positions=positions,
        )
        return SimpleNamespace(
            req_states=None,
            execute_model_state=SimpleNamespace(input_batch=batch),
            speculative_config={} if self.drafting else None,
        )

    @staticmethod
    def gather(rows: list[tuple[Sequence, int, bool]], layers: tuple[int, ...], indices: np.ndarray) -> torch.Tensor:
        assert indices.max() < len(rows), "a padding row is asked for"
        picked = [rows[i] for i in indices]
        return torch.tensor(
            [
                [sequence.value(position, layer) if final else REJECTED for sequence, position, final in picked]
                for layer in layers
            ]
        )

    def end(self, sequences: list[Sequence], collect: bool) -> None:
        """Sequences of one call end together, finished or aborted."""
        captured = [sequence for sequence in sequences if sequence.plan is not None]
        if collect and captured:
            self.check(captured)
        for sequence in sequences:
            self.waiting.remove(sequence)
            self.ended.append(sequence)
            self.finished_req_ids.add(sequence.req_id)
            self.blocks.release(sequence)
            sequence.state = "running"
        for _, recorder, _ in self.stages:
            recorder.discard([sequence.key for sequence in captured])

    def has_row(self, sequence: Sequence, position: int) -> bool:
        where = sequence.req_id, position
        return where in self.seen or (sequence.borrows and (self.lent.get(where), position) in self.seen)

    def check(self, sequences: list[Sequence]) -> None:
        positions = [expected_positions(s.plan.tokens, s.prompt_length, s.num_generated) for s in sequences]
        positions = [p[-1:] if s.plan.pooling == "last" else p for s, p in zip(sequences, positions, strict=True)]
        holes = [[p for p in wanted if not self.has_row(s, p)] for s, wanted in zip(sequences, positions, strict=True)]
        arrived: list[dict[int, torch.Tensor]] = [{} for _ in sequences]
        refused = False
        for layers, recorder, _ in self.stages:
            keys = [(sequence.key, sequence.num_generated) for sequence in sequences]
            collected, missing = recorder.collect(keys, layers.__contains__)
            expected = {
                number: f"{len(holes[number])} of {len(positions[number])} positions never arrived ({holes[number][0]}"
                for number, sequence in enumerate(sequences)
                if holes[number] and set(sequence.plan.layers) & set(layers)
            }
            # What was lost can be computed again after preemption, but a mean that has gone on is not mended.
            broken = {
                number
                for number, sequence in enumerate(sequences)
                if sequence.req_id in self.lossy and sequence.poolable and sequence.plan.pooling == "mean"
            }
            assert set(expected) <= {entry.sequence for entry in missing} <= {*expected, *broken}
            for entry in missing:
                if entry.sequence in broken:
                    assert "positions never arrived" in entry.reason
                else:
                    assert entry.reason.startswith(expected[entry.sequence])
            if missing:
                assert collected == []
                refused = True
                continue
            parcel = parcel_of(self.pool, *collected)
            description = parcel.description()
            for group in (open_group(description, number) for number in range(len(collected))):
                for number, first, end in zip(group.sequences, group.row_start, group.row_start[1:], strict=False):
                    arrived[number] |= {layer: group.values[i, first:end] for i, layer in enumerate(group.layers)}
            parcel.close()
        if refused:
            return
        for sequence, wanted, states in zip(sequences, positions, arrived, strict=True):
            assert sorted(states) == list(sequence.plan.layers)
            for layer, values in states.items():
                # Every position holds its final token's state, drafts notwithstanding.
                expected_values = torch.tensor([sequence.value(position, layer) for position in wanted])
                if sequence.plan.pooling == "mean":
                    expected_values = expected_values.double().mean(dim=0, keepdim=True).float()
                torch.testing.assert_close(values, expected_values, rtol=1e-6, atol=0)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_schedule_loses_mixes_or_adds_a_row(data):
    Simulation(data.draw).run()
