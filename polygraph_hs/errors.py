"""Errors that callers may want to catch by type."""


class IncompleteCaptureError(RuntimeError):
    """States that the capture plan asked for did not arrive. Nothing is filled in for them."""


class EngineDiedError(RuntimeError):
    """vLLM's engine process, or a worker of it, ended while it was generating; a new engine is needed."""


class UnsupportedVersionError(ImportError):
    """The installed vLLM is outside the range that capture supports."""


class LayerNotTappedError(ValueError):
    """A layer was asked for that the engine has no tap on and cannot be given one any more."""


class PromptTooLongError(ValueError):
    """Some prompts do not fit the model's window; every other prompt of the call was answered.

    Attributes:
        outputs: one entry a prompt, in order: the result, or None for a prompt that was too long.
    """

    def __init__(self, message: str, outputs: list):
        super().__init__(message)
        self.outputs = outputs
