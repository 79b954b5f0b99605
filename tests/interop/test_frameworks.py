"""litellm, langchain-openai, and schemathesis on the server's own description."""
import json
import os
import pathlib
import subprocess
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it would ask the network

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def test_litellm_openai(url, weather):
    import litellm
    answer = litellm.completion(
        model="openai/lily-tiny", api_base=url + "/v1", api_key="none", tools=[weather], extra_body=NO_THINKING,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}])
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_litellm_anthropic_streaming(url):
    import litellm
    text = ""
    for chunk in litellm.completion(
            model="anthropic/claude-3-5-haiku-20241022", api_base=url, api_key="none", max_tokens=50, stream=True,
            messages=[{"role": "user", "content": "What is the capital of Japan?"}]):
        text += chunk.choices[0].delta.content or ""
    assert text == "The capital of Japan is Tokyo."


def test_langchain(url, weather):
    from langchain_core.messages import ToolMessage, HumanMessage
    from langchain_openai import ChatOpenAI
    model = ChatOpenAI(model="lily-tiny", base_url=url + "/v1", api_key="none", extra_body=NO_THINKING)
    assert model.invoke("What is the capital of Japan?").content == "The capital of Japan is Tokyo."
    assert "".join(c.content for c in model.stream("What is the capital of Japan?")) == "The capital of Japan is Tokyo."
    with_tools = model.bind_tools([weather])
    messages = [HumanMessage("What is the weather in Paris?")]
    first = with_tools.invoke(messages)
    assert first.tool_calls[0]["args"] == {"city": "Paris"}
    messages += [first, ToolMessage('{"temperature": 20, "condition": "sunny"}', tool_call_id=first.tool_calls[0]["id"])]
    assert "sunny" in with_tools.invoke(messages).content


def test_schemathesis(url, tmp_path):
    program = pathlib.Path(sys.executable).parent / "schemathesis"
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    run = subprocess.run(
        [program, "run", url + "/openapi.json", "--checks", checks, "--max-examples", "15", "--seed", "1",
         "--phases", "fuzzing", "--request-timeout", "60", "--generation-database", "none"],
        capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
