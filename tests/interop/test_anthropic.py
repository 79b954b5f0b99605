"""The anthropic package: messages, streaming, tools, count_tokens, errors."""
import anthropic
import pytest


@pytest.fixture
def client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def tools(weather):
    f = weather["function"]
    return [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}]


def ask(text):
    return [{"role": "user", "content": text}]


def test_message(client):
    message = client.messages.create(model="any", max_tokens=100, messages=ask("What is the capital of Japan?"))
    assert [b.type for b in message.content] == ["text"]
    assert message.content[0].text == "The capital of Japan is Tokyo."
    assert (message.stop_reason, message.model) == ("end_turn", "any")


def test_thinking_streams_before_text(client):
    with client.messages.stream(
            model="m", max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024}, messages=ask("What is 7 + 5?")) as stream:
        for _ in stream:
            pass
        message = stream.get_final_message()
    assert [b.type for b in message.content] == ["thinking", "text"]
    assert "12" in message.content[0].thinking and message.content[0].signature
    assert message.content[1].text == "7 + 5 = 12"
    assert message.usage.output_tokens > 5 and message.usage.input_tokens + message.usage.cache_read_input_tokens > 5


def test_a_tool_loop(client, tools):
    messages = ask("What is the weather in Paris?")
    with client.messages.stream(model="m", max_tokens=200, tools=tools, messages=messages) as stream:
        for _ in stream:
            pass
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    messages += [{"role": "assistant", "content": first.content},
                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id,
                                               "content": '{"temperature": 20, "condition": "sunny"}'}]}]
    second = client.messages.create(model="m", max_tokens=200, tools=tools, messages=messages)
    assert "sunny" in second.content[0].text
    assert second.stop_reason == "end_turn"


def test_stop_sequence_and_max_tokens(client):
    message = client.messages.create(model="m", max_tokens=100, stop_sequences=["Tokyo"], messages=ask("What is the capital of Japan?"))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Tokyo")
    assert message.content[0].text == "The capital of Japan is "
    cut = client.messages.create(model="m", max_tokens=2, messages=ask("What is the capital of Japan?"))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


def test_count_tokens(client):
    n = client.messages.count_tokens(model="m", messages=ask("What is the capital of Japan?")).input_tokens
    usage = client.messages.create(model="m", max_tokens=5, messages=ask("What is the capital of Japan?")).usage
    assert n == usage.input_tokens + usage.cache_read_input_tokens


def test_errors(client):
    with pytest.raises(anthropic.BadRequestError) as e:
        client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}]}])
    assert "images are not supported" in e.value.message
    with pytest.raises(anthropic.BadRequestError) as e:
        client.messages.create(model="m", max_tokens=5, messages=ask("word " * 300000))
    assert e.value.body["error"]["message"].startswith("prompt is too long:")
