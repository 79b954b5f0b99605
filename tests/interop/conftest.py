"""Starts `lily serve` with lily-tiny once, for the tests of real clients."""
import contextlib
import os
import pathlib
import re
import subprocess
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def serving(*options, model=ROOT / "models/lily-tiny"):
    program = os.environ.get("LILY_PROGRAM", str(ROOT / "build/release/lily"))
    server = subprocess.Popen(
        [program, "serve", "-m", str(model), "--port", "0", "--quiet", *options],
        stderr=subprocess.PIPE, text=True, cwd=ROOT)
    lines = []
    try:
        for line in server.stderr:
            lines.append(line)
            ready = re.search(r"ready at (http://\S+)", line)
            if ready:
                break
        else:
            pytest.fail("lily serve has ended:\n" + "".join(lines))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield ready.group(1)
        assert server.poll() is None, "lily serve has ended during the tests"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="session")
def url():
    with serving() as address:
        yield address


@pytest.fixture(scope="session")
def url_with_key():
    with serving("--api-key", "secret-of-the-test") as address:
        yield address


def tool(name, description, **properties):
    return {"type": "function", "function": {
        "name": name, "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(properties)}}}


@pytest.fixture
def weather():
    """The tool that lily-tiny has learned to call."""
    return tool("get_weather", "Get the current weather for a city.",
                city={"type": "string", "description": "The name of the city."})
