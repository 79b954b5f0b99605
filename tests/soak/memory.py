#!/usr/bin/env python3
"""Sixteen conversations at once under a small budget of memory: `lily serve --memory` keeps it.

    python3 tests/soak/memory.py [--lily build/release/lily] [--model models/lily-tiny] [--minutes 10]

First the server is started to see what it takes when it is loaded. Then it is started with a budget of so much and 512 MB,
and sixteen clients load it: chats that grow turn by turn, one-off requests, long prompts, clients that leave, and prompts
that cannot fit. Its resident memory is sampled every 100 ms. It must never be more than 1 % above what the 512 MB allow,
every refusal must name the number that fits, and every other request must be answered. Needs nothing but Python and
Linux. Exit code 1 if something of this does not hold.
"""
import argparse
import collections
import http.client
import json
import pathlib
import random
import re
import socket
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = "river total stream water large small letter house green seven paper stone".split()
CLIENTS = 16
BUDGET_MB = 512            # beyond what is resident after loading
MOST_OVER = 0.01           # of BUDGET_MB
SAMPLE_S = 0.1
SETTLE_S = 3               # after loading, before the first sample counts
MOST_TURNS = 20            # of a chat
LONG_WORDS = (800, 3000)
MB = 10**6


class Server:
    def __init__(self, options, extra):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.process = subprocess.Popen([options.lily, "serve", "-m", options.model, "--port", str(self.port), "--ctx", str(options.ctx),
                                         "--quiet", *options.serve, *extra], stderr=subprocess.PIPE, text=True)
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if "ready at" in line:
                break
        else:
            sys.exit("the server did not start:\n" + "\n".join(self.lines))
        self.reader = threading.Thread(target=lambda: self.lines.extend(line.rstrip() for line in self.process.stderr), daemon=True)
        self.reader.start()

    def resident(self):
        for line in open(f"/proc/{self.process.pid}/status"):
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
        return 0

    def end(self):
        self.process.terminate()
        return self.process.wait(timeout=120)


class Tally:
    def __init__(self):
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.refusals = collections.Counter()
        self.problems = []

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def refused(self, status, message, fits):
        """A refusal names a number that fits: the context of the server, or the length of its queue."""
        with self.lock:
            self.counts["refused"] += 1
            self.refusals[f"{status}: {re.sub('[0-9]+', 'N', message)}"] += 1
            if not any(re.search(rf"\b{number}\b", message) for number in fits):
                self.problems.append(f"a refusal does not name {' or '.join(map(str, fits))}: {status} {message}")

    def problem(self, what):
        with self.lock:
            self.problems.append(what)


def words(rng, n):
    return " ".join(rng.choice(WORDS) for _ in range(n))


class Client:
    def __init__(self, server, number, end, tally, options):
        self.server, self.rng, self.end, self.tally, self.options = server, random.Random(number), end, tally, options

    def ask(self, messages, max_tokens, leave=False):
        """The answer's text; None where there is none."""
        rng, tally = self.rng, self.tally
        body = json.dumps({"messages": messages, "max_tokens": max_tokens, "stream": leave, "temperature": rng.choice([0, 1]),
                           "reasoning_effort": rng.choice(["none", "low"])})
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=600)
        try:
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            if leave and rng.random() < 0.5:
                time.sleep(rng.random())
                return tally.count("left before the answer")
            reply = connection.getresponse()
            if leave and reply.status == 200:
                reply.read(rng.randrange(1, 2000))
                return tally.count("left in the answer")
            data = reply.read()
            if reply.status == 200:
                tally.count("answered")
                return json.loads(data)["choices"][0]["message"]["content"] or ""
            message = json.loads(data)["error"]["message"]
            if reply.status in (400, 413, 503):
                tally.refused(reply.status, message, (self.options.ctx, self.options.queue))
                if reply.status == 503:  # as its Retry-After says
                    time.sleep(1)
            else:
                tally.problem(f"status {reply.status}: {message}")
        except (OSError, http.client.HTTPException, ValueError, KeyError) as e:
            tally.problem(f"{type(e).__name__}: {e}")
        finally:
            connection.close()

    def chat(self):
        """Grows until it is long, or no longer fits."""
        rng = self.rng
        messages = [{"role": "system", "content": "You are helpful. " + words(rng, rng.choice([5, 60, 200]))}]
        for _ in range(rng.randrange(2, MOST_TURNS)):
            messages.append({"role": "user", "content": words(rng, rng.choice([3, 20, 120, 400]))})
            text = self.ask(messages, rng.choice([8, 40, 100]))
            if text is None or time.monotonic() > self.end:
                return
            messages.append({"role": "assistant", "content": text})
            if rng.random() < 0.1:  # another question at an earlier place
                del messages[rng.randrange(1, len(messages)) | 1:]

    def run(self):
        rng = self.rng
        while time.monotonic() < self.end:
            kind = rng.random()
            one = [{"role": "user", "content": words(rng, rng.choice([3, 10, 50]))}]
            if kind < 0.3:
                self.chat()
            elif kind < 0.6:
                self.ask(one, rng.choice([1, 8, 40]))
            elif kind < 0.75:
                self.ask([{"role": "user", "content": words(rng, rng.randrange(*LONG_WORDS))}], 16)
            elif kind < 0.95:
                one[0]["content"] = words(rng, rng.choice([20, 600]))
                self.ask(one, 100, leave=True)
            else:  # more than the context holds
                self.ask([{"role": "user", "content": words(rng, 3 * self.options.ctx)}], 16)


def watch(server, end, samples, tally):
    while time.monotonic() < end and server.process.poll() is None:
        samples.append(server.resident())
        time.sleep(SAMPLE_S)
    if server.process.poll() is not None:
        tally.problem(f"the server ended with {server.process.returncode}: {server.lines[-3:]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lily", default=str(ROOT / "build/release/lily"))
    parser.add_argument("--model", default=str(ROOT / "models/lily-tiny"))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--ctx", type=int, default=8192)
    parser.add_argument("--queue", type=int, default=8, help="requests that may wait; with sixteen clients some are refused")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more options of lily serve, last")
    options = parser.parse_args()
    options.serve += ["--queue", str(options.queue)]

    server = Server(options, [])
    time.sleep(SETTLE_S)
    loaded = server.resident()
    server.end()
    budget = loaded + BUDGET_MB * MB
    most = budget + int(MOST_OVER * BUDGET_MB * MB)

    server = Server(options, ["--memory", str(budget)])
    print("\n".join(line for line in server.lines if "weights" in line))
    tally, samples = Tally(), []
    end = time.monotonic() + options.minutes * 60
    threads = [threading.Thread(target=Client(server, i, end, tally, options).run) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    watch(server, end, samples, tally)
    for thread in threads:
        thread.join()
    samples.append(server.resident())
    try:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/metrics")
        metrics = connection.getresponse().read().decode().splitlines()
        shown = ("lily_cache_hits", "lily_cache_misses", "lily_cache_evictions", "lily_cache_states", "lily_pool_", "lily_replay_bytes")
        print("\n".join(line for line in metrics if line.startswith(shown)))
    except OSError as e:
        tally.problem(f"/metrics: {e}")
    if (code := server.end()) != 0:
        tally.problem(f"exit code {code}")

    peak = max(samples)
    over = sum(sample > most for sample in samples)
    if over:
        tally.problem(f"resident memory was above {most / MB:.1f} MB in {over} of {len(samples)} samples")
    if tally.counts["answered"] < CLIENTS:
        tally.problem(f"only {tally.counts['answered']} answers")
    if not tally.counts["refused"]:
        tally.problem("nothing was refused: the load does not try what cannot fit")
    print(f"{CLIENTS} clients, {options.minutes:g} minutes: {dict(sorted(tally.counts.items()))}")
    print(f"resident: {loaded / MB:.1f} MB after loading, budget {budget / MB:.1f} MB, peak {peak / MB:.1f} MB "
          f"({100 * (peak - loaded) / (BUDGET_MB * MB):.1f} % of the {BUDGET_MB} MB), median {sorted(samples)[len(samples) // 2] / MB:.1f} MB")
    for what, n in tally.refusals.most_common():
        print(f"refused {n} times: {what}")
    for problem in tally.problems[:20]:
        print("problem:", problem)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
