"""Asks a proxy for one completion and for one that must be refused; exits with what was wrong."""

import json
import os
import sys
import urllib.error
import urllib.request


def ask(path, body=None):
    """Status and answer; with a body it is a POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        os.environ["PROXY_URL"] + path, data, {"content-type": "application/json"}
    )
    keys = [line.strip() for line in os.environ.get("API_KEYS", "").splitlines()]
    for key in [key for key in keys if key and not key.startswith("#")][:1]:
        request.add_header("authorization", f"Bearer {key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


status, answer = ask("/v1/models")
if status != 200:
    sys.exit(f"the list of models was answered with {status}: {answer}")
good = {
    "model": answer["data"][0]["id"],
    "prompt": "The capital of France is",
    "max_tokens": 4,
    "temperature": 0,
}
status, answer = ask("/v1/completions", good)
if status != 200 or not answer["choices"][0]["text"]:
    sys.exit(f"a completion was answered with {status}: {answer}")
print("completed:", answer["choices"][0]["text"])

status, answer = ask("/v1/completions", {**good, "max_tokens": -1})
if status != 400 or "max_tokens" not in json.dumps(answer):
    sys.exit(f"max_tokens -1 was not refused with 400 but answered with {status}: {answer}")
print("refused:", answer["error"]["message"])
