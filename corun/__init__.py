"""CoRun: a prefill-decode LLM serving cluster whose output is bitwise reproducible.

These are the public names. Importing them starts nothing and loads neither serving code nor torch.
"""

from corun.client.client import AsyncClient, Client
from corun.client.generations import Generations
from corun.completion import Chunk, Generation, Prompt, Sample, Score, Scores
from corun.config.fields import TlsConfig
from corun.errors import (
    CancelledByPeerError,
    ContractMismatchError,
    CorunError,
    DataLossError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    StaleGenerationError,
    UnauthenticatedError,
    UnavailableError,
)
from corun.params import SamplingParams
from corun.receipt import Receipt
from corun.records.verification import Condition, VerifyCase, VerifyResult
from corun.types import ClusterStatus, FinishReason, Priority

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "CancelledByPeerError",
    "Chunk",
    "Client",
    "ClusterStatus",
    "Condition",
    "ContractMismatchError",
    "CorunError",
    "DataLossError",
    "DeadlineError",
    "FinishReason",
    "Generation",
    "Generations",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "Priority",
    "Prompt",
    "Receipt",
    "Sample",
    "SamplingParams",
    "Score",
    "Scores",
    "StaleGenerationError",
    "TlsConfig",
    "UnauthenticatedError",
    "UnavailableError",
    "VerifyCase",
    "VerifyResult",
    "__version__",
]
