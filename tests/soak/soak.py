#!/usr/bin/env python3
"""Many clients at once against `lily serve`: mixed lengths, clients that leave, slow readers, garbage.

    python3 tests/soak/soak.py [--lily build/release/lily] [--clients 64] [--minutes 10]

Every accepted request must be answered or refused with a right code, nobody may starve, the process must live, and its
memory must stay flat after the warm-up. Needs nothing but Python. Exit code 1 if something of this does not hold.
"""
import argparse
import collections
import http.client
import json
import pathlib
import random
import socket
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = "river total stream water large small letter house green seven paper stone".split()
WARM_UP_SHARE = 0.3   # of the time, after which memory must be flat
MOST_GROWTH = 1.05    # of resident memory from there on
MOST_WAIT_S = 120     # for an answer: more is a starved client


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def resident_mb(pid):
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024


class Tally:
    def __init__(self):
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.problems = []
        self.longest_s = 0

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def problem(self, what):
        with self.lock:
            self.counts["problems"] += 1
            if len(self.problems) < 20:
                self.problems.append(what)

    def waited(self, seconds):
        with self.lock:
            self.longest_s = max(self.longest_s, seconds)


def body_of(rng, stream):
    n_words = rng.choice([3, 10, 50, 400, 1500])
    messages = [{"role": "user", "content": " ".join(rng.choice(WORDS) for _ in range(n_words))}]
    return json.dumps({"messages": messages, "stream": stream, "max_tokens": rng.choice([1, 8, 40, 120]),
                       "temperature": rng.choice([0, 1]), "reasoning_effort": rng.choice(["none", "low"])})


def ask(port, rng, tally, stream, leave=False, slow=False):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MOST_WAIT_S)
    start = time.monotonic()
    try:
        connection.request("POST", "/v1/chat/completions", body_of(rng, stream), {"Content-Type": "application/json"})
        if leave and rng.random() < 0.5:
            time.sleep(rng.random() * 0.3)
            tally.count("left before the answer")
            return
        reply = connection.getresponse()
        if leave:
            reply.read(rng.randrange(1, 400))
            tally.count("left in the answer")
            return
        data = b""
        while True:
            part = reply.read1(64 if slow else 65536)
            if not part:
                break
            data += part
            if slow:
                time.sleep(0.05)
        tally.waited(time.monotonic() - start)
        if reply.status == 503:
            if json.loads(data)["error"]["code"] != "queue_full":
                tally.problem(f"503 with {data[:200]!r}")
            tally.count("503 queue_full")
        elif reply.status != 200:
            tally.problem(f"status {reply.status}: {data[:200]!r}")
        elif stream and not data.endswith(b"data: [DONE]\n\n"):
            tally.problem(f"a stream without its end: ...{data[-200:]!r}")
        elif not stream and json.loads(data)["choices"][0]["finish_reason"] not in ("stop", "length"):
            tally.problem(f"finish_reason: {data[:200]!r}")
        else:
            tally.count("answered, slowly read" if slow else "answered")
    except (OSError, http.client.HTTPException, ValueError) as e:
        tally.problem(f"{type(e).__name__}: {e}")
    finally:
        connection.close()


def garbage(port, rng, tally):
    pieces = [bytes(rng.randrange(256) for _ in range(200)), b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\n",
              b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\n\r\n{]{[}", b"\r\n" * 50, b"A" * 9000]
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as s:
            s.settimeout(5)
            s.sendall(rng.choice(pieces))
            if rng.random() < 0.7:
                s.recv(4096)
    except OSError:
        pass
    tally.count("garbage")


def client(port, seed, end, tally):
    rng = random.Random(seed)
    while time.monotonic() < end:
        kind = rng.random()
        if kind < 0.1:
            garbage(port, rng, tally)
        elif kind < 0.3:
            ask(port, rng, tally, stream=rng.random() < 0.7, leave=True)
        elif kind < 0.35:
            ask(port, rng, tally, stream=True, slow=True)
        else:
            ask(port, rng, tally, stream=rng.random() < 0.5)
        time.sleep(rng.random() * 0.2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lily", default=str(ROOT / "build/release/lily"))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    port = free_port()
    server = subprocess.Popen([options.lily, "serve", "-m", "models/lily-tiny", "--port", str(port), "--ctx", "8192", "--quiet"],
                              cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if "ready at" in line:
            break
    drain = threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True)
    drain.start()
    tally = Tally()
    begin = time.monotonic()
    end = begin + options.minutes * 60
    threads = [threading.Thread(target=client, args=(port, i, end, tally)) for i in range(options.clients)]
    for thread in threads:
        thread.start()
    warm_mb = most_mb = 0
    while time.monotonic() < end and server.poll() is None:
        time.sleep(2)
        now_mb = resident_mb(server.pid)
        if time.monotonic() < begin + (end - begin) * WARM_UP_SHARE:
            warm_mb = max(warm_mb, now_mb)
        else:
            most_mb = max(most_mb, now_mb)
    for thread in threads:
        thread.join()
    alive = server.poll() is None
    if alive:
        ask(port, random.Random(1), tally, stream=False)
        metrics = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        metrics.request("GET", "/metrics")
        text = metrics.getresponse().read().decode()
        running = int(next(l for l in text.splitlines() if l.startswith("lily_requests_running")).split()[1])
        if running != 0:
            tally.problem(f"{running} answers still run when all clients have gone")
        server.terminate()
        if server.wait(timeout=60) != 0:
            tally.problem(f"exit code {server.returncode}")
    else:
        tally.problem(f"the server ended with {server.returncode}")
    if most_mb > warm_mb * MOST_GROWTH:
        tally.problem(f"memory grew from {warm_mb:.0f} to {most_mb:.0f} MB")
    if tally.longest_s > MOST_WAIT_S:
        tally.problem(f"an answer took {tally.longest_s:.0f} s")
    print(f"{options.clients} clients, {options.minutes:g} minutes: {dict(sorted(tally.counts.items()))}")
    print(f"longest wait {tally.longest_s:.1f} s; resident {warm_mb:.0f} MB after the warm-up, then at most {most_mb:.0f} MB")
    for problem in tally.problems:
        print("problem:", problem)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
