#!/usr/bin/env python3
"""Decode speed through the server for one client, beside `lily bench` on the same model.

    python3 tests/soak/speed.py [--lily build/release/lily] [-m models/lily-tiny] [--rounds 7] [--length 256] [--tokens 256]

Runs on any Linux machine with python3, the program and the model; nothing else is needed. The last line is PASSED or
FAILED, and the exit code 0 or 1: the median of the rounds' ratios must reach --least, by default 0.85 for lily-tiny, whose
token takes less than a millisecond, and 0.97 for a model of full size.

The two alternate, round by round, so that a machine that gets busier or slower hits both; where memory does not hold the
model twice, one ends before the other begins. `bench` is what the engine writes
without a server; `server` what reaches a client that reads a stream, from its first token to its last one by the client's
clock.

A checkpoint of `lily synth` has no tokenizer, which a server needs. It is then served from a folder of links beside which
lies lily-tiny's tokenizer, filled up with made-up tokens to the vocabulary's size, so that as many tokens are candidates.
"""
import argparse
import contextlib
import http.client
import json
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]  # of the repository; elsewhere both paths have to be given
TINY = ROOT / "models/lily-tiny"
FULL_SIZE_BYTES = 1 << 30


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def with_tokenizer(model, folder):
    """The model with lily-tiny's tokenizer and template; more tokens up to the number of rows of its head."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if not (folder / name).exists():
            (folder / name).symlink_to(TINY / name)
    config = json.loads((model / "config.json").read_text())
    n_rows = config.get("text_config", config)["vocab_size"]
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first = 1 + max(*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"]))
    vocabulary.update((f"made-up-{i}", i) for i in range(first, n_rows))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def bench(options):
    out = subprocess.run([options.lily, "bench", "-m", options.model, "--phase", "decode", "--lengths", str(options.length),
                          "--tokens", str(options.tokens), "--rounds", "1", "--json", *options.more],
                         check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out)["results"][0]["tok_s"]["median"]


def served(port, options, rng, n_tokens):
    """Tokens a second by the client's clock and by the server's; an answer that ends early is asked for again."""
    for _ in range(10):
        body = {"prompt": [rng.randrange(5, 4000) for _ in range(options.length)], "max_tokens": n_tokens,
                "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        first = last = details = usage = None
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            last = time.monotonic()
            first = first or last
            event = json.loads(line[6:])
            details = event.get("lily") or details
            usage = event.get("usage") or usage
        connection.close()
        if usage and usage["completion_tokens"] >= n_tokens // 2:
            return (usage["completion_tokens"] - 1) / (last - first), details["decode_tps"]
    sys.exit("FAILED: the model ends its answers early; try another --length")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lily", default=str(ROOT / "build/release/lily"))
    parser.add_argument("-m", "--model", default=str(TINY))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--least", type=float, help="the median ratio must not be below (default: by the model's size)")
    parser.add_argument("more", nargs="*", help="more options of both, after --: -- --threads 2")
    options = parser.parse_args()
    if options.least is None:
        options.least = 0.97 if model_bytes(options.model) >= FULL_SIZE_BYTES else 0.85
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(options.model)
        return compare(options, model if (model / "tokenizer.json").exists() else with_tokenizer(model, pathlib.Path(folder)))


def model_bytes(model):
    return sum(file.stat().st_size for file in pathlib.Path(model).glob("*.safetensors"))


def available_bytes():
    for line in open("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def running_server(options, served_model):
    """Its port, once it has answered and so is warm."""
    port = free_port()
    server = subprocess.Popen([options.lily, "serve", "-m", str(served_model), "--port", str(port), "--parallel", "1",
                               "--ctx", str(options.length + options.tokens + 1), "--quiet", *options.more],
                              stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            if "ready at" in line:
                break
        else:
            sys.exit("FAILED: the server did not start")
        served(port, options, random.Random(0), 16)
        yield port
    finally:
        server.terminate()
        server.wait()


def compare(options, served_model):
    rng = random.Random(1)
    ratios = []

    def measure(port_now):
        alone = bench(options)
        with port_now() as port:
            client, engine = served(port, options, rng, options.tokens)
        ratios.append(client / alone)
        print(f"round {len(ratios)}: bench {alone:.1f} tok/s, server {client:.1f} tok/s (its own figure {engine:.1f}), "
              f"ratio {ratios[-1]:.3f}", flush=True)

    if 2 * model_bytes(options.model) < available_bytes():
        with running_server(options, served_model) as port:
            for _ in range(options.rounds):
                measure(lambda: contextlib.nullcontext(port))
    else:
        for _ in range(options.rounds):
            measure(lambda: running_server(options, served_model))
    median = statistics.median(ratios)
    passed = median >= options.least
    print(f"{'PASSED' if passed else 'FAILED'}: median ratio {median:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}; "
          f"at least {options.least} is wanted")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
