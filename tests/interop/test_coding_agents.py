"""Claude Code and Codex, the programs themselves, each with one turn and a home of its own.

Their prompts are far from what lily-tiny has learned, so it is the exchange that is looked at: the request was understood,
the stream was read to its end, and the answer arrived as the agent's own result. A short system prompt keeps the model
from rambling; tools are offered by Codex all the same."""
import importlib.util
import json
import os
import pathlib
import subprocess

import pytest


def program(package, path):
    found = importlib.util.find_spec(package)
    file = pathlib.Path(found.submodule_search_locations[0]) / path if found else None
    if file is None or not os.access(file, os.X_OK):
        pytest.skip(f"{package} with {path} is not installed")
    return str(file)


def run(arguments, home, **environment):
    done = subprocess.run(arguments, env={"PATH": os.environ["PATH"], "HOME": str(home), **environment}, cwd=home,
                          capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_claude_code(url, tmp_path):
    claude = program("claude_agent_sdk", "_bundled/claude")
    out = run([claude, "-p", "--output-format", "json", "--tools", "", "--system-prompt", "You are a helpful assistant.", "What is 7 + 5?"],
              tmp_path, ANTHROPIC_BASE_URL=url, ANTHROPIC_AUTH_TOKEN="none", ANTHROPIC_MODEL="lily-tiny",
              CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1")
    result = json.loads(out[out.index("{\""):])
    assert (result["type"], result["subtype"], result["is_error"]) == ("result", "success", False), result
    assert result["result"].strip()
    assert list(result["modelUsage"]) == ["lily-tiny"]
    assert result["usage"]["input_tokens"] > 100 and result["usage"]["output_tokens"] > 0


def test_codex(url, tmp_path):
    codex = program("codex_cli_bin", "bin/codex")
    (tmp_path / ".codex").mkdir()
    (tmp_path / "instructions.md").write_text("You are a helpful assistant.\n")
    (tmp_path / ".codex/config.toml").write_text(
        f'model = "lily-tiny"\nmodel_provider = "lily"\nmodel_instructions_file = "{tmp_path}/instructions.md"\n'
        f'[model_providers.lily]\nname = "lily"\nbase_url = "{url}/v1"\nwire_api = "responses"\n')
    out = run([codex, "exec", "--skip-git-repo-check", "--json", "What is 7 + 5?"], tmp_path)
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    messages = [e["item"]["text"] for e in events if e["type"] == "item.completed" and e["item"]["type"] == "agent_message"]
    assert messages and messages[-1].strip(), out
    assert events[-1]["type"] == "turn.completed", out
    assert events[-1]["usage"]["input_tokens"] > 1000 and events[-1]["usage"]["output_tokens"] > 0
    assert not any(e["type"] in ("error", "turn.failed") for e in events), out
