"""`helm test`: the release is ready, lists its models, completes, streams and counts; or what the arguments name.

Standard library only: it runs in the server's image or in any with Python. ``load`` waits until the release is ready,
and becomes `python3 -m loadtest` with the arguments that follow.
"""

import json
import os
import sys
import time
import urllib.request

KEY = ""
if "KEYS_FILE" in os.environ:
    with open(os.environ["KEYS_FILE"]) as keys:
        KEY = next((line.strip() for line in keys if line.strip() and not line.strip().startswith("#")), "")
API, HEALTH = os.environ["API"], os.environ["HEALTH"]


def call(url, body=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
        return answer.read().decode()


def model():
    return json.loads(call(f"{API}/v1/models"))["data"][0]["id"]


def request():
    return {"model": model(), "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def ready():
    assert json.loads(call(f"{HEALTH}/health/ready"))["ready"], "not ready"
    print("ready")


def models():
    print("models:", model())


def completion():
    whole = json.loads(call(f"{API}/v1/completions", request()))["choices"][0]["text"]
    assert whole, "an empty completion"
    print("completion:", repr(whole))


def streaming():
    lines = [line for line in call(f"{API}/v1/completions", request() | {"stream": True}).splitlines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    streamed = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert streamed, "an empty stream"
    print("streaming:", repr(streamed))


def metrics():
    assert "mizzen_requests_finished_total" in call(f"{HEALTH}/metrics"), "no metrics"
    print("metrics")


def load(command, *arguments):
    until = time.monotonic() + float(os.environ["WAIT_S"])
    while True:
        try:
            ready()
            break
        except OSError as error:  # 503 while it loads; refused before
            if time.monotonic() > until:
                sys.exit(f"not ready: {error}")
            time.sleep(2)
    if KEY:
        os.environ["OPENAI_API_KEY"] = KEY
    os.execv(sys.executable, [sys.executable, "-m", "loadtest", command, "--base-url", f"{API}/v1", *arguments])


TESTS = {"ready": ready, "models": models, "completion": completion, "streaming": streaming, "metrics": metrics}

if sys.argv[1:2] == ["load"]:
    load(*sys.argv[2:])
for name in sys.argv[1:] or TESTS:
    TESTS[name]()
