"""The image's HEALTHCHECK: exit code 0 if /health/ready answers 200. Imports little, for it runs every few seconds."""

import http.client
import os
import sys

TIMEOUT_S = 4


def main() -> int:
    port = int(os.environ.get("MIZZEN_HEALTH_PORT") or 8001)
    host = os.environ.get("MIZZEN_HEALTH_HOST", "auto")
    if port == 0:
        port, host = int(os.environ.get("MIZZEN_PORT") or 8000), "auto"
    if host == "auto":
        host = os.environ.get("MIZZEN_HOST", "auto")
    if host in ("auto", "0.0.0.0", ""):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        print(answer.read(4096).decode(errors="replace"))  # docker inspect shows it: the phase, and how far it is
    except OSError as error:
        print(f"http://{host}:{port}/health/ready: {error}")
        return 1
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
