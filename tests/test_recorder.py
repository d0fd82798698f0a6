"""Layout and recorder alone: what is kept under schedules that real engines produce now and then."""

import numpy as np
import pytest
import torch

from polygraph_hs.capture.delivery import Parcel, new_token, open_parcel, read_groups
from polygraph_hs.capture.layout import StepLayout
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
    assert all(chunk.values.shape[1] == 3 for chunk in recorder.chunks)


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


def contents_in_pieces(parcel: Parcel, size: int) -> bytearray:
    return bytearray().join(parcel.contents(start, start + size) for start in range(0, parcel.size, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_parcel_keeps_values_and_dtype_through_memory_and_through_bytes(dtype):
    values = torch.randn(2, 5, 3).to(dtype)
    parcel = Parcel(
        [Collected((1, 4), values, [0, 1], [0, 2, 5]), Collected((2,), values[:1, :1], [2], [0, 1])], new_token()
    )
    description = parcel.description()
    mapped, copied = open_parcel(description), read_groups(contents_in_pieces(parcel, 48), description)
    parcel.close()
    for first, second in (mapped, copied):
        assert torch.equal(first.values, values) and first.values.dtype == dtype
        assert (first.layers, first.sequences, first.row_start) == ((1, 4), [0, 1], [0, 2, 5])
        assert torch.equal(second.values, values[:1, :1])


def test_memory_that_is_not_the_announced_parcel_is_not_opened():
    parcel, other = (Parcel([Collected((1,), torch.zeros(1, 1, 3), [0], [0, 1])], new_token()) for _ in range(2))
    assert open_parcel({**parcel.description(), "fd": other.fd}) is None
    assert open_parcel({**parcel.description(), "fd": 10_000}) is None
    with pytest.raises(ValueError, match="token"):
        read_groups(contents_in_pieces(other, 10**6), parcel.description())
    with pytest.raises(ValueError, match=f"has 40 bytes where {parcel.size} were announced"):
        read_groups(contents_in_pieces(parcel, 10**6)[:40], parcel.description())
