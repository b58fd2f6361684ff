"""`helm test`: the release is ready, lists its models, completes, streams, and counts. Standard library only."""

import json
import os
import urllib.request

KEYS = [line.strip() for line in os.environ.get("KEYS", "").splitlines()]
KEY = next((line for line in KEYS if line and not line.startswith("#")), "")


def call(url, body=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
        return answer.read().decode()


api, health = os.environ["API"], os.environ["HEALTH"]
assert json.loads(call(f"{health}/health/ready"))["ready"], "not ready"
print("ready")
model = json.loads(call(f"{api}/v1/models"))["data"][0]["id"]
print("models:", model)
request = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
whole = json.loads(call(f"{api}/v1/completions", request))["choices"][0]["text"]
assert whole, "an empty completion"
print("completion:", repr(whole))
lines = [line for line in call(f"{api}/v1/completions", request | {"stream": True}).splitlines() if line]
assert lines[-1] == "data: [DONE]", lines[-1]
chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
streamed = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
assert streamed, "an empty stream"
print("streaming:", repr(streamed))
if os.environ["METRICS"] == "true":
    assert "mizzen_requests_finished_total" in call(f"{health}/metrics"), "no metrics"
    print("metrics")
