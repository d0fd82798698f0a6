"""Uncertainty estimation from hidden states captured inside one vLLM generation pass.

Public names resolve on first use: a vLLM worker process imports ``polygraph_hs.capture.worker`` and must not
pull in lm-polygraph, and the capture side must run where lm-polygraph is not installed.
"""

from importlib import import_module

__version__ = "0.2.0"

_PUBLIC = {
    "CaptureEngine": "polygraph_hs.engine",
    "CapturePlan": "polygraph_hs.spec",
    "EngineDiedError": "polygraph_hs.errors",
    "Generation": "polygraph_hs.engine",
    "HiddenStates": "polygraph_hs.states",
    "HiddenStatesModel": "polygraph_hs.model",
    "IncompleteCaptureError": "polygraph_hs.errors",
    "LayerNotTappedError": "polygraph_hs.errors",
    "PromptTooLongError": "polygraph_hs.errors",
    "UnsupportedVersionError": "polygraph_hs.errors",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'polygraph_hs' has no attribute {name!r}; it has {', '.join(_PUBLIC)}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
