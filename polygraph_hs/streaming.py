"""Generations for any number of prompts, in bounded memory: each is handed over as it finishes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from polygraph_hs.engine import CaptureEngine, Generation
from polygraph_hs.errors import PromptTooLongError
from polygraph_hs.spec import CapturePlan, ranges

# A finished sequence waits this long for others, to be collected with them.
MAX_WAIT_SECONDS = 0.5
# Room for requests that wait in vLLM, or have finished, while as many as it can run are running.
IN_FLIGHT_FOR_EACH_RUNNING = 1.5
# Prompts are taken, and finished sequences collected, when there are so many parts of what may be in flight.
WAVES_IN_FLIGHT = 4
COLLECTIONS_IN_FLIGHT = 8


@dataclass(eq=False)
class _Wave:
    """Prompts that were taken together and may lend each other the states of a prefix: they are collected together.

    Attributes:
        unfinished: how many of them vLLM has not finished.
        finished: those that it has.
    """

    unfinished: int = 0
    finished: list[_Entry] = field(default_factory=list)


@dataclass(eq=False)
class _Entry:
    """One prompt in flight.

    Attributes:
        number: of the prompt, from 0.
        original: the prompt as the caller gave it.
        request: its ``vllm.SamplingParams``.
        wave: if its states may be lent to or borrowed from others.
        output: vLLM's ``RequestOutput``, once it has finished.
    """

    number: int
    original: object
    request: object
    wave: _Wave | None
    output: object = None


class Stream:
    """Iterates over ``(number of the prompt, its generations)``; see :meth:`CaptureEngine.stream`.

    Attributes:
        in_flight: by vLLM's number of the request, those whose generations have not been handed over yet.
    """

    def __init__(
        self,
        engine: CaptureEngine,
        prompts: Iterable,
        sampling_params,
        plan: CapturePlan | None,
        max_in_flight: int | None,
        lora_request,
        tokenize: Callable[[object], list[int]],
    ):
        if isinstance(prompts, str):
            raise ValueError(f"prompts={prompts!r} is one text; give an iterable of prompts")
        if max_in_flight is None:
            running = engine.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
            max_in_flight = max(math.ceil(IN_FLIGHT_FOR_EACH_RUNNING * running / sampling_params.n), 1)
        if not isinstance(max_in_flight, int) or isinstance(max_in_flight, bool) or max_in_flight < 1:
            raise ValueError(f"max_in_flight={max_in_flight!r} must be an integer of at least 1")
        engine._check_seeds([sampling_params], num_tokens=None)
        if plan is not None:
            engine.require_layers(plan.layers)
        self.engine = engine
        self.prompts = enumerate(prompts)
        self.sampling_params = sampling_params
        self.plan = plan
        self.max_in_flight = max_in_flight
        self.lora_request = lora_request
        self.tokenize = tokenize
        self.in_flight: dict[int, _Entry] = {}
        self.finished: list[_Entry] = []
        self.waiting_since = math.inf
        # Prompts that could not be answered, and why.
        self.refused: dict[int, str] = {}
        self.too_long = 0
        # What ended the caller's iterable, if it was not its end.
        self.error: Exception | None = None
        self.exhausted = False

    def __iter__(self) -> Iterator[tuple[int, list[Generation]]]:
        def numbers() -> dict[int, int]:
            return {request: entry.number for request, entry in self.in_flight.items()}

        def requests() -> list:
            return [entry.request for entry in self.in_flight.values()]

        with self.engine._taking_back(numbers, requests):
            while True:
                self._take()
                if not self.in_flight:
                    break
                self._step()
                for entry, generations in self._collect():
                    # Handed over, whatever the caller does next.
                    yield entry.number, generations
        if self.error is not None:
            raise self.error
        if self.refused:
            reasons = "; ".join(f"prompt {number}: {reason}" for number, reason in list(self.refused.items())[:5])
            message = f"{len(self.refused)} prompts were not answered ({reasons}). All others were"
            raise PromptTooLongError(message, []) if self.too_long == len(self.refused) else ValueError(message)

    def _take(self) -> None:
        """Give vLLM as many prompts as there is room for, a wave at a time."""
        size = max(self.max_in_flight // WAVES_IN_FLIGHT, 1)
        while not self.exhausted and len(self.in_flight) + size <= self.max_in_flight:
            taken = list(self._next(size))
            if not taken:
                continue
            numbers, originals, token_ids = zip(*taken, strict=True)
            count = len(taken)
            engine = self.engine
            inputs, requests = engine._inputs(list(token_ids), [self.sampling_params] * count, [self.plan] * count)
            wave = _Wave()
            first = engine.llm.request_counter.counter
            for request, number, original, params, given in zip(
                itertools.count(first), numbers, originals, requests, inputs
            ):
                together = wave if "cache_salt" in given else None
                self.in_flight[request] = _Entry(number, original, params, together)
                wave.unfinished += together is not None
            engine.llm.enqueue(inputs, requests, lora_request=self.lora_request, use_tqdm=False)

    def _next(self, size: int) -> Iterator[tuple[int, object, list[int]]]:
        """Number, prompt and token ids of up to ``size`` more prompts that can be answered."""
        for _ in range(size):
            try:
                number, prompt = next(self.prompts)
            except StopIteration:
                self.exhausted = True
                return
            except Exception as error:
                # What is in flight is handed over before the caller sees this.
                self.error, self.exhausted = error, True
                return
            try:
                token_ids = self.tokenize(prompt)
            except ValueError as error:
                self.refused[number] = str(error)
                continue
            if not token_ids:
                self.refused[number] = "it is empty (no tokens)"
            elif outside := self.engine._outside_vocabulary(token_ids):
                self.refused[number] = (
                    f"the token ids {outside[:5]} are outside the vocabulary, 0 to {self.engine.vocabulary_size - 1}"
                )
            elif len(token_ids) >= self.engine.max_model_len:
                self.too_long += 1
                self.refused[number] = (
                    f"{len(token_ids)} tokens are more than the {self.engine.max_model_len - 1} that a prompt may "
                    f"fill of the model's window"
                )
            else:
                yield number, prompt, token_ids

    def _step(self) -> None:
        """Let vLLM go on until some request has changed, and note which are finished."""
        engine = self.engine.llm.llm_engine
        if not engine.has_unfinished_requests():
            lost = [entry.number for entry in self.in_flight.values() if entry.output is None]
            raise RuntimeError(
                f"vLLM has no requests left, but prompts {ranges(lost)} never finished; were they aborted?"
            )
        for output in engine.step():
            if not output.finished:
                continue
            entry = self.in_flight[int(output.request_id)]
            entry.output = output
            ready = [entry]
            if entry.wave is not None:
                entry.wave.finished.append(entry)
                entry.wave.unfinished -= 1
                ready = entry.wave.finished if entry.wave.unfinished == 0 else []
            if ready and not self.finished:
                self.waiting_since = time.monotonic()
            self.finished += ready

    def _collect(self) -> Iterator[tuple[_Entry, list[Generation]]]:
        """Hand over what is finished, if it is enough, has waited long enough, or is all there is."""
        enough = len(self.finished) >= max(self.max_in_flight // COLLECTIONS_IN_FLIGHT, 1)
        waited = time.monotonic() - self.waiting_since > MAX_WAIT_SECONDS
        if not self.finished or not (enough or waited or len(self.finished) == len(self.in_flight)):
            return
        finished, self.finished = self.finished, []
        generations = self.engine._generations(
            [entry.output for entry in finished],
            [entry.request for entry in finished],
            [entry.original for entry in finished],
            [entry.number for entry in finished],
        )
        done = set(finished)
        self.in_flight = {request: entry for request, entry in self.in_flight.items() if entry not in done}
        yield from zip(finished, generations, strict=True)
