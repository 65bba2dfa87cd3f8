"""Dispatch and combine of tokens over the ranks of one host: kernels, memory and protocol."""

from .buffer import LowLatencyBuffer
from .errors import ExchangeError, MisuseError, PeerTimeout
from .heap import CudaHeap, Heap, LocalGroup, SharedHeap, heap_of
from .kernels import Kernels, default_kernels
from .results import Combined, Dispatched, Handle

__all__ = [
    "Combined",
    "CudaHeap",
    "Dispatched",
    "ExchangeError",
    "Handle",
    "Heap",
    "Kernels",
    "LocalGroup",
    "LowLatencyBuffer",
    "MisuseError",
    "PeerTimeout",
    "SharedHeap",
    "default_kernels",
    "heap_of",
]
