"""Mizzen: an LLM serving appliance. The offline API is exported here; nothing heavy is imported until it is used."""

from typing import TYPE_CHECKING, Any

from mizzen.sampling_params import SamplingParams
from mizzen.version import __version__

if TYPE_CHECKING:
    from mizzen.llm import LLM, RequestOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "RequestOutput"):
        from mizzen import llm  # torch is imported only when the offline engine is asked for

        return getattr(llm, name)
    raise AttributeError(f"module 'mizzen' has no attribute {name!r}")
