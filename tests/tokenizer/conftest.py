"""Tokenizers that several files share; loading one is not cheap."""

import pytest
import tokenizer_samples as samples

from mizzen.tokenizer.hf import HFTokenizer


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return samples.load(tmp_path_factory.mktemp("byte-level"), samples.byte_level(), eos_token="<|im_end|>")


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return samples.load(tmp_path_factory.mktemp("byte-fallback"), samples.byte_fallback(), bos_token="<s>")
