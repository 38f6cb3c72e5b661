"""Exceptions of the engine.

EngineError
├── EngineStartError    the engine process cannot start; one line that says what to do
├── KVPoolError         the KV pool cannot be made; the message names --kv-bytes or --block-size
├── ModelNotSupportedError  neither we nor transformers can compute this model; one line that says why
├── TensorParallelError a model that --tp ranks cannot share; the message names the numbers that fit
├── DeviceError         --device cannot be had, or not with the other options
├── GrammarError        a structure that no answer can be held to
├── GrammarQueueFull    a structure that cannot be compiled now
├── KernelsError        the compiled kernels cannot be used here; the message says why
├── WeightFormatError   the weights cannot be kept in the form asked for by --dtype
└── ModelOutputError    the model produced something that no token can be drawn from
"""


class EngineError(Exception):
    """Root of everything the engine raises."""


class EngineStartError(EngineError):
    """The engine process cannot start with its configuration."""


class KVPoolError(EngineError, ValueError):
    """The KV pool does not fit, or holds no usable block."""


class ModelNotSupportedError(EngineError):
    """A model whose attention and cache the engine cannot own."""


class TensorParallelError(EngineError, ValueError):
    """A model that cannot be shared out to so many ranks."""


class DeviceError(EngineError, ValueError):
    """A device that is not there, or that does not go with another option."""


class GrammarError(EngineError, ValueError):
    """Structured output of a kind or with keywords that cannot be obeyed."""


class GrammarQueueFull(EngineError):
    """Too many structures wait for a compiler; the same request may be served later."""


class KernelsError(EngineError):
    """The C++ kernels are missing, or do not fit this processor or model."""


class WeightFormatError(EngineError, ValueError):
    """A weight format that does not exist, or that this machine or model does not allow."""


class ModelOutputError(EngineError):
    """Logits that are not numbers."""
