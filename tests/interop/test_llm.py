"""The llm command-line tool, set up as docs/clients.md says."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

LLM = pathlib.Path(sys.executable).parent / "llm"


@pytest.fixture
def llm(url, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: lily\n  model_name: lily-tiny\n  api_base: {url}/v1\n"
        "  supports_tools: true\n  supports_schema: true\n")

    def run(*arguments):
        done = subprocess.run([LLM, *arguments], env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LLM_USER_PATH": str(tmp_path)},
                              capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
    return run


def test_it_lists_and_answers_streamed_and_whole(llm):
    assert "lily" in llm("models")
    for more in ([], ["--no-stream"]):
        assert llm("-m", "lily", "What is 7 + 5?", *more) == "7 + 5 = 12"


def test_a_conversation_goes_on(llm):
    llm("-m", "lily", "My name is Tom.")
    assert llm("-c", "What is my name?") == "Your name is Tom."


def test_a_tool_is_called(llm):
    answer = llm("-m", "lily", "What is the weather in Paris?", "--functions",
                 'def get_weather(city: str) -> str:\n    "Get the current weather for a city."\n'
                 '    return \'{"temperature": 20, "condition": "sunny"}\'\n')
    assert "sunny" in answer and "20" in answer


def test_a_schema_is_kept(llm):
    answer = llm("-m", "lily", "--schema", "name, age int", "--no-stream",
                 "Give me a JSON object with the keys name and age for Mila, who is 30 years old.")
    assert json.loads(answer) == {"name": "Mila", "age": 30}
