"""What to capture: which layers, which tokens, which pooling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Under this name the worker finds its options in additional_config, and a request's in SamplingParams.extra_args.
CONFIG_KEY = "polygraph_hs"
TOKENS = ("last_prompt", "generated", "prompt", "all")
POOLINGS = ("none", "mean", "last")


def check_tokens(tokens: str) -> str:
    """Return ``tokens`` if it is a known token selection, else raise ValueError."""
    if tokens not in TOKENS:
        raise ValueError(f"tokens={tokens!r} is not a token selection; choose one of {', '.join(TOKENS)}")
    return tokens


def check_pooling(pooling: str) -> str:
    """Return ``pooling`` if it is a known pooling, else raise ValueError."""
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r} is not a pooling; choose one of {', '.join(POOLINGS)}")
    return pooling


def resolve_layer(layer: int, num_hidden_layers: int) -> int:
    """Turn a layer index into the non-negative one that Hugging Face uses.

    Args:
        layer: 0 is the embedding output, i the output of decoder block i (1-based), ``num_hidden_layers`` the
            last state after the final norm; negative indices count from the end.
        num_hidden_layers: number of decoder blocks of the model.
    """
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):
        raise ValueError(f"layer={layer!r} is not an integer; give the indices of the layers, such as 0, 12 or -1")
    index = layer.__index__()
    if not -(num_hidden_layers + 1) <= index <= num_hidden_layers:
        raise ValueError(
            f"layer={index} does not exist: this model has {num_hidden_layers} decoder blocks, so layers go from 0 "
            f"(embeddings) to {num_hidden_layers} (after the final norm), or from -{num_hidden_layers + 1} to -1"
        )
    return index % (num_hidden_layers + 1)


def resolve_layers(layers: Iterable[int], num_hidden_layers: int) -> tuple[int, ...]:
    """Non-negative, ascending, without repeats; see :func:`resolve_layer`."""
    return tuple(sorted({resolve_layer(layer, num_hidden_layers) for layer in layers}))


def token_span(tokens: str, prompt_length: int, num_generated: int) -> tuple[int, int]:
    """First position and one past the last position of a token selection.

    Positions are absolute in prompt + generation, from 0. The last generated token is never fed back, so a
    sequence of P prompt and G generated tokens has states at 0 .. P+G-2.
    """
    start = 0 if tokens in ("prompt", "all") else prompt_length - 1
    stop = prompt_length if tokens in ("prompt", "last_prompt") else prompt_length + num_generated - 1
    return start, stop


@dataclass(frozen=True)
class CapturePlan:
    """What to keep of each sequence.

    Attributes:
        layers: layer indices (see :func:`resolve_layer`), in any order, negative ones allowed.
        tokens: ``last_prompt`` (position P-1, the state that predicts the first generated token), ``generated``
            (P-1 .. P+G-2, the states that predict each generated token), ``prompt`` (0 .. P-1) or ``all``.
        pooling: ``none`` keeps every token, ``mean`` their mean in float32, ``last`` the last of them.
    """

    layers: tuple[int, ...]
    tokens: str = "generated"
    pooling: str = "none"

    def __post_init__(self):
        layers = self.layers
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise ValueError(f"layers={layers!r} is not a list of layer indices; give for example layers=[10, -1]")
        layers = tuple(layers)
        if not layers:
            raise ValueError("layers=[] captures nothing; name at least one layer, for example layers=[-1]")
        object.__setattr__(self, "layers", layers)
        check_tokens(self.tokens)
        check_pooling(self.pooling)

    def resolved(self, num_hidden_layers: int) -> CapturePlan:
        """The same plan with non-negative, ascending layers."""
        return CapturePlan(resolve_layers(self.layers, num_hidden_layers), self.tokens, self.pooling)

    def union(self, other: CapturePlan) -> CapturePlan:
        """The smallest plan from which both can be served. Both must be resolved."""
        if self.tokens == other.tokens:
            tokens = self.tokens
            pooling = self.pooling if self.pooling == other.pooling else "none"
        else:
            # Position P-1 belongs to every selection, so last_prompt never widens another.
            wider = {self.tokens, other.tokens} - {"last_prompt"}
            tokens = wider.pop() if len(wider) == 1 else "all"
            pooling = "none"
        return CapturePlan(tuple(sorted({*self.layers, *other.layers})), tokens, pooling)

    def needs_whole_prompt(self) -> bool:
        """Whether the plan asks for prompt positions that a prefix cache may skip."""
        return self.tokens in ("prompt", "all")


def request_args(key: str, n: int, plan: CapturePlan, borrows: bool = False) -> dict:
    """What a request carries in ``SamplingParams.extra_args[CONFIG_KEY]``: numbers and strings alone.

    Args:
        key: the driver's unique name for the request.
        n: how many sequences are sampled from it.
        plan: a resolved plan.
        borrows: whether the request may read the prefix cache for positions that the plan asks for; every request
            that can have filled the cache for it must then borrow too.
    """
    return {
        "key": key,
        "n": n,
        "layers": list(plan.layers),
        "tokens": plan.tokens,
        "pooling": plan.pooling,
        "borrows": borrows,
    }


def plan_of_request(args: dict) -> CapturePlan:
    """The plan in what :func:`request_args` returned.

    Raises:
        ValueError: it is something else.
    """
    known = {"key": str, "n": int, "layers": list, "tokens": str, "pooling": str, "borrows": bool}
    wrong = not isinstance(args, dict) or args.keys() != known.keys()
    if wrong or not all(isinstance(args[name], kind) for name, kind in known.items()):
        raise ValueError(
            f"extra_args[{CONFIG_KEY!r}]={args!r} is not what polygraph_hs.spec.request_args makes, whose entries are "
            + ", ".join(f"{name} ({kind.__name__})" for name, kind in known.items())
        )
    return CapturePlan(tuple(args["layers"]), args["tokens"], args["pooling"])


def as_layers(layers: int | Sequence[int]) -> tuple[int, ...]:
    """One layer index or several, as a tuple."""
    return (layers,) if hasattr(layers, "__index__") else tuple(layers)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending integers in few words: ``[3, 4, 5, 9]`` is ``3-5, 9``; at most five ranges are named."""
    if len(numbers) == 0:
        return "none"
    numbers = np.asarray(numbers)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more ranges" if len(texts) > 5 else "")
