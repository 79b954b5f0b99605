#!/usr/bin/env python3
"""Many clients at once against `lily serve`: mixed lengths, clients that leave, slow readers, garbage.

    python3 tests/soak/soak.py [--lily build/release/lily] [-m models/lily-tiny] [--clients 64] [--minutes 10]

Runs on any Linux machine with python3, the program and the model; nothing else is needed. The last line is PASSED or
FAILED, and the exit code 0 or 1. Every accepted request must be answered or refused with a right code, nobody may starve, the process must live, and its
memory must stay flat after the warm-up.

Starvation is counted against the machine's own speed, not against a clock: of the requests that wait the shortest one and the
oldest one are taken up in turn, so an accepted answer may see only as many later ones begin before it does as there were
before it. An answer that has not begun although many more than that have, is starved. So is a client that had no answer at
all while the others had many. An answer that takes longer than --most-wait is a problem too, unless the machine is so slow
that the mean wait of so many clients is not far below it; the last lines say so then.
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

ROOT = pathlib.Path(__file__).resolve().parents[2]  # of the repository; elsewhere both paths have to be given
WORDS = "river total stream water large small letter house green seven paper stone".split()
WARM_UP_SHARE = 0.3   # of the time, after which memory must be flat
MOST_FILLING = 200    # prompts that may be needed to fill the cache
MOST_GROWTH = 1.05    # of resident memory from there on
MOST_OVERTAKEN = 2    # times the clients: later answers that begin before an accepted one does
MOST_MEAN_WAITS = 4   # times the mean wait of a client: an answer that takes longer is late, whatever the machine
MOST_LINGER = 5        # seconds that an answer may run on without a client
MOST_BEHIND = 10       # a client without an answer is starved when the middle one has had so many


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def resident_mb(pid):
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024


def metric(port, name):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return int(next(line for line in lines if line.startswith(f"lily_{name} ")).split()[1])


def memory_mb(server, port):
    """Resident memory without the answers that are remembered, which may fill their own bound."""
    return resident_mb(server.pid) - metric(port, "replay_bytes") / 2**20


class Tally:
    def __init__(self):
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.problems = []
        self.late = []            # answers that took longer than --most-wait
        self.waits = {}           # class of prompt -> seconds to the first token
        self.gaps = [0]           # the longest silence in each answer after its first token
        self.n_begun = 0          # answers that have begun, of all clients
        self.most_overtaken = 0
        self.per_client = collections.Counter()

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def problem(self, what):
        with self.lock:
            self.counts["problems"] += 1
            if len(self.problems) < 20:
                self.problems.append(what)

    def begun(self, n_words, seconds, sent_at, n_waiting_before, is_timed):
        """sent_at: how many answers had begun when this one was asked for; those asked for before it come first."""
        with self.lock:
            self.n_begun += 1
            if not is_timed:
                return
            self.waits.setdefault(n_words, []).append(seconds)
            self.most_overtaken = max(self.most_overtaken, self.n_begun - 1 - sent_at - n_waiting_before)

    def ended(self, client, gap_s):
        with self.lock:
            self.per_client[client] += 1
            self.gaps.append(gap_s)


def body_of(rng, stream):
    n_words = rng.choice([3, 10, 50, 400, 1500])
    messages = [{"role": "user", "content": " ".join(rng.choice(WORDS) for _ in range(n_words))}]
    return n_words, json.dumps({"messages": messages, "stream": stream, "max_tokens": rng.choice([1, 8, 40, 120]),
                                "temperature": rng.choice([0, 1]), "reasoning_effort": rng.choice(["none", "low"])})


def ask(port, rng, tally, options, number, stream, leave=False, slow=False):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=options.most_wait)
    n_words, body = body_of(rng, stream)
    with tally.lock:
        sent_at, waiting_before = tally.n_begun, tally.counts["asked"] - tally.n_begun - tally.counts["gone before they began"]
        tally.counts["asked"] += 1
    start = last = time.monotonic()
    phase, first = "sending", None
    gap = 0
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        if leave and rng.random() < 0.5:
            time.sleep(rng.random() * 0.3)
            tally.count("left before the answer")
            return
        phase = "waiting for the headers"
        reply = connection.getresponse()
        phase = "reading"
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
            now = time.monotonic()
            # Only what the model has written counts: keep-alives and the role come at once.
            if first is None and reply.status == 200 and (not stream or b'"content":"' in data.replace(b'"content":""', b"")
                                                          or b'"reasoning"' in data or b'"finish_reason":"' in data):
                first = last = now
                # Of a whole answer only its end is seen, and a slow reader sees its beginning late.
                tally.begun(n_words, first - start, sent_at, waiting_before, stream and not slow)
            elif first is not None:
                gap, last = max(gap, now - last), now
            if now - start > options.most_wait:
                raise TimeoutError("the answer is not done")
            if slow:
                time.sleep(0.05)
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
            tally.ended(number, 0 if slow else gap)
    except TimeoutError as e:
        tally.count("slower than --most-wait")
        tally.late.append(f"{n_words} words, {'streamed' if stream else 'whole'}: {e} after {time.monotonic() - start:.0f} s"
                      + ("" if first is None else f", of which {first - start:.0f} s to its first token"))
    except (OSError, http.client.HTTPException, ValueError) as e:
        tally.problem(f"{type(e).__name__}: {e} while {phase} after {time.monotonic() - start:.0f} s")
    finally:
        if first is None:
            tally.count("gone before they began")
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


def client(port, number, end, tally, options):
    rng = random.Random(number)
    while time.monotonic() < end:
        kind = rng.random()
        if kind < 0.1:
            garbage(port, rng, tally)
        elif kind < 0.3:
            ask(port, rng, tally, options, number, stream=rng.random() < 0.7, leave=True)
        elif kind < 0.35:
            ask(port, rng, tally, options, number, stream=True, slow=True)
        else:
            ask(port, rng, tally, options, number, stream=rng.random() < 0.5)
        time.sleep(rng.random() * 0.2)


def fill_cache(port):
    """Uses every block and state that was planned at the start once: until then they are not resident."""
    rng = random.Random(0)
    n_sent = 0
    for n_words, is_full in ((1500, lambda: metric(port, "cache_evictions_total") > 0), (3, lambda: metric(port, "state_slots_free") == 0)):
        for _ in range(MOST_FILLING):
            if is_full():
                break
            words = " ".join(rng.choice(WORDS) + str(rng.randrange(1000)) for _ in range(n_words))
            body = json.dumps({"messages": [{"role": "user", "content": words}], "max_tokens": 1})
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            connection.getresponse().read()
            connection.close()
            n_sent += 1
    print(f"{n_sent} prompts filled the cache: {metric(port, 'kv_blocks_free')} of {metric(port, 'kv_blocks')} blocks and "
          f"{metric(port, 'state_slots_free')} of {metric(port, 'state_slots')} states are free", flush=True)


def starved(tally, n_clients):
    """What the counts say of clients that waited too long."""
    out = []
    if tally.most_overtaken > MOST_OVERTAKEN * n_clients:
        out.append(f"{tally.most_overtaken} later answers began before an accepted one did")
    answers = sorted(tally.per_client[i] for i in range(n_clients))
    if answers[0] == 0 and answers[n_clients // 2] >= MOST_BEHIND:
        out.append(f"{answers.count(0)} clients had no answer, and half of the others {answers[n_clients // 2]} or more")
    return out


def share(values, part):
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def report(tally, n_clients, begin_mb, warm_mb, most_mb, end_mb):
    for n_words, waits in sorted(tally.waits.items()):
        print(f"first token of prompts of {n_words} words: median {share(waits, 0.5):.2f} s, 95 % {share(waits, 0.95):.2f} s, "
              f"longest {max(waits):.2f} s ({len(waits)} answers)")
    answers = [tally.per_client[i] for i in range(n_clients)]
    print(f"longest silence within an answer {max(tally.gaps):.2f} s; answers a client {min(answers)} to {max(answers)}; an accepted "
          f"answer was overtaken by up to {tally.most_overtaken} later ones")
    print(f"resident memory without remembered answers: {begin_mb:.1f} MB at the start, {warm_mb:.1f} MB after the warm-up, {end_mb:.1f} MB at the end "
          f"(x {end_mb / max(warm_mb, 1):.3f}), {most_mb:.1f} MB at most")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lily", default=str(ROOT / "build/release/lily"))
    parser.add_argument("-m", "--model", default=str(ROOT / "models/lily-tiny"))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--most-wait", type=float, default=120, help="seconds for a whole answer")
    options = parser.parse_args()
    port = free_port()
    server = subprocess.Popen([options.lily, "serve", "-m", options.model, "--port", str(port), "--ctx", "8192", "--quiet"],
                              stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if "ready at" in line:
            break
    else:
        print(f"FAILED: the server did not start, exit code {server.wait()}")
        return 1
    drain = threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True)
    drain.start()
    tally = Tally()
    begin_mb = memory_mb(server, port)
    fill_cache(port)
    begin = time.monotonic()
    end = begin + options.minutes * 60
    threads = [threading.Thread(target=client, args=(port, i, end, tally, options)) for i in range(options.clients)]
    for thread in threads:
        thread.start()
    warm_mb = most_mb = end_mb = 0
    while time.monotonic() < end and server.poll() is None:
        time.sleep(2)
        try:
            now_mb = memory_mb(server, port)
        except OSError as e:
            tally.problem(f"/metrics: {e}")
            continue
        if time.monotonic() < begin + (end - begin) * WARM_UP_SHARE:
            warm_mb = max(warm_mb, now_mb)
        most_mb = max(most_mb, now_mb)
    for thread in threads:
        thread.join()
    alive = server.poll() is None
    if alive:
        ask(port, random.Random(1), tally, options, 0, stream=False)
        end_mb = memory_mb(server, port)
        # A client's place is given back a moment after it has its last byte, or is found to have gone.
        patience = time.monotonic() + MOST_LINGER
        while (running := metric(port, "requests_running")) != 0 and time.monotonic() < patience:
            time.sleep(0.1)
        if running != 0:
            tally.problem(f"{running} answers still run {MOST_LINGER} s after all clients have gone")
        server.terminate()
        if server.wait(timeout=60) != 0:
            tally.problem(f"exit code {server.returncode}")
    else:
        tally.problem(f"the server ended with {server.returncode}")
    if most_mb > warm_mb * MOST_GROWTH:
        tally.problem(f"memory grew from {warm_mb:.0f} to {most_mb:.0f} MB")
    for what in starved(tally, options.clients):
        tally.problem("starved: " + what)
    n_answers = sum(tally.per_client.values())
    mean_wait = options.clients * options.minutes * 60 / max(n_answers, 1)
    is_fast = mean_wait * MOST_MEAN_WAITS <= options.most_wait
    if is_fast:
        for what in tally.late:
            tally.problem(what)
    print(f"{options.clients} clients, {options.minutes:g} minutes: {dict(sorted(tally.counts.items()))}")
    report(tally, options.clients, begin_mb, warm_mb, most_mb, end_mb)
    for problem in tally.problems:
        print("problem:", problem)
    if not is_fast:
        print(f"waits are not judged: {n_answers} answers are too few for {options.clients} clients, a mean wait of {mean_wait:.0f} s; "
              f"{len(tally.late)} answers took longer than {options.most_wait:g} s. Run it on a faster or an idle machine")
    print(f"FAILED: {tally.counts['problems']} problems" if tally.problems else "PASSED")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
