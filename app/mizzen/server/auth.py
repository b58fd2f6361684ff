"""API keys are compared by their digests, with every key, in time that depends on none of them."""

import hashlib
import hmac
from collections.abc import Iterable

from mizzen.errors import AuthenticationFailed


class Keys:
    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: bytes) -> int:
        """The key's place among the keys, from 0, given the Authorization header. Raises AuthenticationFailed."""
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise AuthenticationFailed("No API key was given: send the header 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise AuthenticationFailed("The API key is wrong")
        return matches.index(True)
