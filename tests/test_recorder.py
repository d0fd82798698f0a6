"""Layout and recorder alone: what is kept under schedules that real engines produce now and then."""

import numpy as np
import pytest
import torch
from reference import parcel_of

from polygraph_hs.capture import pooling
from polygraph_hs.capture.delivery import Parcel, SegmentPool, num_bytes, open_group, read_group
from polygraph_hs.capture.layout import StepLayout
from polygraph_hs.capture.pooling import DevicePooling, Pooled, Progress
from polygraph_hs.capture.recorder import Collected, Recorder
from polygraph_hs.spec import CapturePlan

LAYERS = (1, 4)


def step(recorder: Recorder, rows: list[tuple[str, int, int]], version: float = 0.0) -> None:
    """Record a step of (request, first position, number of rows).

    The state of request "7" at position p in layer l is 700 + p + l / 10 + version: who, where and when.
    """
    query_start = np.concatenate([[0], np.cumsum([count for _, _, count in rows])])
    layout = StepLayout([req_id for req_id, _, _ in rows], query_start, np.array([first for _, first, _ in rows]))
    states = torch.tensor([int(req) * 100 + p for req, first, count in rows for p in range(first, first + count)])

    def gather(indices: np.ndarray) -> torch.Tensor:
        kept = states[torch.from_numpy(indices)]
        return torch.stack([kept + layer / 10 + version for layer in LAYERS])[:, :, None]

    recorder.record(layout, LAYERS, gather)


def started(plan: CapturePlan, *prompt_lengths: int) -> Recorder:
    recorder = Recorder()
    for number, prompt_length in enumerate(prompt_lengths, start=1):
        recorder.add_request(str(number), (f"key{number}", 0), plan, prompt_length)
    return recorder


def collect(recorder: Recorder, *generated: int, is_local=lambda layer: True):
    sequences = [((f"key{number}", 0), count) for number, count in enumerate(generated, start=1)]
    return recorder.collect(sequences, is_local)


def columns(collected: Collected, sequence: int, layer: int = 0) -> list[float]:
    first, end = collected.row_start[sequence : sequence + 2]
    return collected.values[layer, first:end, 0].tolist()


ALL = CapturePlan(LAYERS, "all")


def approx(*values: float):
    return pytest.approx(list(values), abs=1e-4)


def test_chunks_of_mixed_requests_come_together_by_position():
    recorder = started(ALL, 3, 2)
    step(recorder, [("1", 0, 2), ("2", 0, 2)])
    step(recorder, [("2", 2, 1), ("1", 2, 1)])
    step(recorder, [("1", 3, 1)])
    (collected,), missing = collect(recorder, 2, 2)
    assert missing == []
    assert columns(collected, 0) == approx(100.1, 101.1, 102.1, 103.1)
    assert columns(collected, 1, layer=1) == approx(200.4, 201.4, 202.4)


def test_a_position_computed_again_overwrites():
    recorder = started(ALL, 2)
    step(recorder, [("1", 0, 2)])
    step(recorder, [("1", 2, 1)])
    step(recorder, [("1", 0, 3)], version=50)
    (collected,), _ = collect(recorder, 2)
    assert columns(collected, 0) == approx(150.1, 151.1, 152.1)


def test_an_extra_step_behind_the_last_token_leaves_no_row():
    recorder = started(CapturePlan(LAYERS, "generated", "mean"), 2)
    step(recorder, [("1", 0, 2)])
    step(recorder, [("1", 2, 1)])
    step(recorder, [("1", 3, 1)])
    (collected,), _ = collect(recorder, 2)
    assert columns(collected, 0) == approx((101.1 + 102.1) / 2)


def test_a_rejected_draft_is_replaced_by_the_token_that_stands_there():
    recorder = started(ALL, 1)
    step(recorder, [("1", 0, 1)])
    step(recorder, [("1", 1, 3)], version=50)
    step(recorder, [("1", 2, 1)])
    (collected,), _ = collect(recorder, 3)
    assert columns(collected, 0) == approx(100.1, 151.1, 102.1)


def test_a_missing_position_is_named_and_nothing_is_returned():
    recorder = started(ALL, 3, 2)
    step(recorder, [("1", 1, 2), ("2", 0, 2)])
    collected, missing = collect(recorder, 1, 1)
    assert collected == []
    assert missing == [(0, "1 of 3 positions never arrived (0) for layers [1, 4]")]


def test_a_request_that_no_step_ever_held_is_missing():
    recorder = started(ALL, 3)
    collected, missing = collect(recorder, 1)
    assert collected == []
    assert missing == [(0, "3 of 3 positions never arrived (0-2) for layers [1, 4]")]
    assert recorder.collect([(("other", 0), 1)], lambda layer: True)[1] == [
        (0, "its request never reached this worker")
    ]


def test_requests_with_other_plans_or_none_share_steps():
    recorder = started(CapturePlan((4,), "last_prompt"), 3)
    recorder.add_request("2", ("key2", 0), CapturePlan(LAYERS, "prompt", "last"), 2)
    step(recorder, [("9", 0, 5), ("1", 0, 3), ("2", 0, 2)])
    collected, _ = collect(recorder, 1, 1)
    assert [part.layers for part in collected] == [(4,), LAYERS]
    assert columns(collected[0], 0) == approx(102.4)
    assert columns(collected[1], 0) == approx(201.1)
    # The last prompt token of each, and no row of the request that asks for nothing.
    assert [chunk.values.shape[1] for chunk in recorder.chunks] == [2]


def test_a_stage_that_has_some_of_the_layers_gives_those():
    recorder = started(ALL, 1)
    step(recorder, [("1", 0, 1)])
    (collected,), _ = collect(recorder, 1, is_local=lambda layer: layer > 2)
    assert collected.layers == (4,)


def test_discarding_frees_rows_once_nobody_needs_their_step():
    recorder = started(ALL, 1, 1)
    step(recorder, [("1", 0, 1), ("2", 0, 1)])
    recorder.discard([("key1", 0), ("unknown", 0)])
    assert len(recorder.chunks) == 1
    assert recorder.collect([(("key2", 0), 1)], lambda layer: True)[1] == []
    recorder.discard([("key2", 0)])
    assert (recorder.chunks, recorder.requests, recorder.by_key) == ([], {}, {})


def test_a_sequence_without_a_generated_token_has_no_state_to_give():
    recorder = started(CapturePlan(LAYERS, "generated", "last"), 2, 2)
    step(recorder, [("1", 0, 2), ("2", 0, 2)])
    assert collect(recorder, 1, 0) == ([], [(1, "it has no state for tokens='generated': 0 generated")])


def test_two_requests_with_the_same_capture_arguments_are_told_apart_from_one():
    recorder = started(ALL, 1)
    recorder.add_request("2", ("key1", 0), ALL, 1)
    step(recorder, [("1", 0, 1), ("2", 0, 1)])
    (entry,) = collect(recorder, 1)[1]
    assert entry.sequence == 0
    assert entry.reason.startswith("2 requests (1, 2) carry its capture arguments")
    recorder.discard([("key1", 0)])
    assert (recorder.chunks, recorder.requests, recorder.by_key) == ([], {}, {})


def test_rows_of_a_step_most_of_which_nobody_needs_give_up_its_memory():
    recorder = started(ALL, 1, 3)
    step(recorder, [("1", 0, 1), ("2", 0, 3)])
    recorder.discard([("key2", 0)])
    assert [chunk.values.shape[1] for chunk in recorder.chunks] == [1]
    (collected,), _ = collect(recorder, 1)
    assert columns(collected, 0) == approx(100.1)


def test_a_last_state_needs_no_row_before_it():
    recorder = started(CapturePlan(LAYERS, "all", "last"), 3)
    step(recorder, [("1", 2, 1)])
    step(recorder, [("1", 3, 1)])
    (collected,), missing = collect(recorder, 2)
    assert missing == []
    assert columns(collected, 0) == approx(103.1)
    assert collect(recorder, 3)[1] == [(0, "1 of 1 positions never arrived (4) for layers [1, 4]")]


@pytest.mark.parametrize("rows_at_once", [64, 10**6])
def test_sums_of_long_prompts_are_those_of_their_rows_one_by_one(monkeypatch, rows_at_once):
    # Longer than a partial sum, and in pieces where there is little scratch memory.
    monkeypatch.setattr(pooling, "SCRATCH_BYTES", rows_at_once * 2 * 8 * 4)
    lengths = np.array([1, 64, 65, 300, 2])
    rows = torch.randn(2, lengths.sum(), 8)
    sums = DevicePooling(len(lengths), depth=3, hidden_size=8, device=torch.device("cpu"))
    sums.set_layers(LAYERS)
    sequences = [Pooled(Progress.of_new(0, 1000, length, is_mean=True)) for length in lengths]
    starts = np.cumsum(lengths) - lengths
    sums.record(sequences, starts, np.zeros(5, dtype=np.int64), lengths, lambda rows_of: rows[:, rows_of])
    out = torch.empty(2, 5, 8)
    sums.collect([(sequence, 0, int(length)) for sequence, length in zip(sequences, lengths, strict=True)], LAYERS, out)
    for number, part in enumerate(rows.split(lengths.tolist(), dim=1)):
        torch.testing.assert_close(out[:, number], part.double().mean(dim=1).float(), rtol=1e-5, atol=1e-6)


def contents_in_pieces(parcel: Parcel, group: int, size: int) -> bytearray:
    total = num_bytes(parcel.groups[group])
    return bytearray().join(parcel.contents(group, start, min(start + size, total)) for start in range(0, total, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_parcel_keeps_values_and_dtype_through_memory_and_through_bytes(dtype):
    values = torch.randn(2, 5, 3).to(dtype)
    parcel = parcel_of(
        SegmentPool(), Collected((1, 4), values, [0, 1], [0, 2, 5]), Collected((2,), values[:1, :1], [2], [0, 1])
    )
    description = parcel.description()
    mapped = [open_group(description, number) for number in (0, 1)]
    copied = [read_group(contents_in_pieces(parcel, number, 48), description, number) for number in (0, 1)]
    parcel.close()
    for first, second in (mapped, copied):
        assert torch.equal(first.values, values) and first.values.dtype == dtype
        assert (first.layers, first.sequences, first.row_start) == ((1, 4), [0, 1], [0, 2, 5])
        assert torch.equal(second.values, values[:1, :1])


def test_memory_that_is_not_the_announced_parcel_is_not_opened():
    pool = SegmentPool()
    parcel, other = (parcel_of(pool, Collected((1,), torch.zeros(1, 1, 3), [0], [0, 1])) for _ in range(2))
    (group,) = parcel.description()["groups"]
    for fd in (other.segments[0].fd, 10_000):
        assert open_group({**parcel.description(), "groups": [{**group, "fd": fd}]}, 0) is None
    with pytest.raises(ValueError, match="token"):
        read_group(contents_in_pieces(other, 0, 10**6), parcel.description(), 0)
    with pytest.raises(ValueError, match=f"has 40 bytes where {num_bytes(group)} were announced"):
        read_group(contents_in_pieces(parcel, 0, 10**6)[:40], parcel.description(), 0)


def test_memory_is_used_again_once_the_driver_has_let_go_of_it():
    pool = SegmentPool()

    def deliver(value: float) -> torch.Tensor:
        parcel = parcel_of(pool, Collected((1,), torch.full((1, 100, 3), value), [0], [0, 100]))
        values = open_group(parcel.description(), 0).values
        parcel.close()
        return values

    first = deliver(1.0)
    part = first[:, :1]
    second = deliver(2.0)
    # The first one's memory is still read, so there are two.
    assert (part == 1).all() and (first == 1).all() and (second == 2).all()
    assert len(pool.idle) == 2
    del first
    third = deliver(3.0)
    assert (part == 1).all() and (third == 3).all()
    assert len(pool.idle) == 3
    del part, second, third
    for value in range(20):
        assert (deliver(value) == value).all()
    # What nobody has needed for long has been given back.
    assert len(pool.idle) == 1
