"""stub while building"""
from .client import AsyncIdempotency as AsyncMemoryIdempotency, Idempotency as MemoryIdempotency
