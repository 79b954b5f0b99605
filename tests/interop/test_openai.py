"""The openai package: chat completions, completions, responses."""
import json

import openai
import pytest
from pydantic import BaseModel

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)


def ask(text):
    return [{"role": "user", "content": text}]


def test_models(client):
    models = client.models.list().data
    assert [m.id for m in models] == ["lily-tiny"]
    assert client.models.retrieve("lily-tiny").id == "lily-tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_chat(client):
    answer = client.chat.completions.create(model="any", messages=ask("What is the capital of Japan?"), extra_body=NO_THINKING)
    assert answer.choices[0].message.content == "The capital of Japan is Tokyo."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "any"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_thinks_first(client):
    message = client.chat.completions.create(model="m", messages=ask("What is 7 + 5?")).choices[0].message
    assert "12" in message.reasoning_content
    assert message.reasoning == message.reasoning_content
    assert message.content == "7 + 5 = 12"


def test_chat_streams_what_the_whole_answer_says(client):
    request = dict(model="m", messages=ask("What is 7 + 5?"), temperature=0)
    whole = client.chat.completions.create(**request).choices[0].message
    content = reasoning = ""
    usage = None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        if not chunk.choices:
            usage = chunk.usage
            continue
        content += chunk.choices[0].delta.content or ""
        reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert (content, reasoning) == (whole.content, whole.reasoning_content)
    assert usage.completion_tokens_details.reasoning_tokens > 0


def test_a_tool_loop(client, weather):
    messages = ask("What is the weather in Paris?")
    first = client.chat.completions.create(model="m", messages=messages, tools=[weather], extra_body=NO_THINKING).choices[0]
    assert first.finish_reason == "tool_calls"
    call = first.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 20, "condition": "sunny"}'}]
    second = client.chat.completions.create(model="m", messages=messages, tools=[weather], extra_body=NO_THINKING).choices[0]
    assert second.finish_reason == "stop"
    assert "sunny" in second.message.content and "20" in second.message.content


def test_streamed_parallel_tools(client, weather):
    with client.chat.completions.stream(
            model="m", messages=ask("What is the weather in Paris and in London?"), tools=[weather], extra_body=NO_THINKING) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    cities = [json.loads(c.function.arguments)["city"] for c in message.tool_calls]
    assert cities == ["Paris", "London"]
    assert len({c.id for c in message.tool_calls}) == 2


def test_parallel_calls_can_be_switched_off(client, weather):
    message = client.chat.completions.create(
        model="m", messages=ask("What is the weather in Paris and in London?"), tools=[weather], parallel_tool_calls=False,
        extra_body=NO_THINKING).choices[0].message
    assert len(message.tool_calls) == 1


def test_tool_choice_none(client, weather):
    choice = client.chat.completions.create(
        model="m", messages=ask("What is the weather in Paris?"), tools=[weather], tool_choice="none", max_tokens=60,
        extra_body=NO_THINKING).choices[0]
    assert choice.message.tool_calls is None


def test_tool_choice_required(client, weather):
    choice = client.chat.completions.create(
        model="m", messages=ask("hello"), tools=[weather], tool_choice="required", max_tokens=60, extra_body=NO_THINKING).choices[0]
    assert choice.message.tool_calls[0].function.name == "get_weather"


class Person(BaseModel):
    name: str
    age: int


def test_structured_output_is_parsed(client):
    answer = client.chat.completions.parse(
        model="m", messages=ask("Give me a JSON object with the keys name and age for Mila, who is 30 years old."),
        response_format=Person, extra_body=NO_THINKING)
    assert answer.choices[0].message.parsed == Person(name="Mila", age=30)


def test_logprobs(client):
    choice = client.chat.completions.create(
        model="m", messages=ask("What is the capital of Japan?"), logprobs=True, top_logprobs=2, extra_body=NO_THINKING).choices[0]
    text = b"".join(bytes(t.bytes) for t in choice.logprobs.content)
    assert text.decode() == choice.message.content
    assert all(t.logprob <= 0 and len(t.top_logprobs) == 2 for t in choice.logprobs.content)


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="m", messages=ask("a"), n=3)
    assert e.value.param == "n"
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="m", messages=ask("word " * 300000))
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).chat.completions.create(model="m", messages=ask("Tell me a story."))


def test_text_completion(client):
    answer = client.completions.create(model="m", prompt="In the beginning", max_tokens=5, echo=True, temperature=0)
    assert answer.choices[0].text.startswith("In the beginning")
    streamed = "".join(c.choices[0].text for c in client.completions.create(
        model="m", prompt="In the beginning", max_tokens=5, echo=True, temperature=0, stream=True))
    assert streamed == answer.choices[0].text


def test_response(client):
    response = client.responses.create(model="m", input="What is 7 + 5?")
    assert response.status == "completed"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == "7 + 5 = 12"


def test_response_goes_on_from_a_stored_one(client):
    first = client.responses.create(model="m", input="My name is Tom.", reasoning={"effort": "none"})
    second = client.responses.create(model="m", input="What is my name?", previous_response_id=first.id, reasoning={"effort": "none"})
    assert second.output_text == "Your name is Tom."
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_response_streams_a_call(client, weather):
    flat = {"type": "function", **weather["function"]}
    with client.responses.stream(
            model="m", input="What is the weather in Paris?", tools=[flat], reasoning={"effort": "none"}) as stream:
        numbers = [event.sequence_number for event in stream]
        final = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    call = final.output[0]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    answer = client.responses.create(
        model="m", tools=[flat], reasoning={"effort": "none"}, previous_response_id=final.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 20, "condition": "sunny"}'}])
    assert "sunny" in answer.output_text


def test_response_of_one_token_is_incomplete(client):
    response = client.responses.create(model="m", input="hello", max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
