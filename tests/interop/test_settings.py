"""The settings of docs/clients.md as it gives them: variables of the environment, and the server's key."""
import anthropic
import openai
import pytest

ASK = [{"role": "user", "content": "What is the capital of Japan?"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def test_openai_from_the_environment(url, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", url + "/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    answer = openai.OpenAI(max_retries=0).chat.completions.create(model="m", messages=ASK, extra_body=NO_THINKING)
    assert answer.choices[0].message.content == "The capital of Japan is Tokyo."


@pytest.mark.parametrize("key", ["ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"])
def test_anthropic_from_the_environment(url, monkeypatch, key):
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.setenv("ANTHROPIC_BASE_URL", url)
    monkeypatch.setenv(key, "none")
    message = anthropic.Anthropic(max_retries=0).messages.create(model="m", max_tokens=50, messages=ASK)
    assert message.content[0].text == "The capital of Japan is Tokyo."


def test_the_key_is_wanted_and_taken(url_with_key):
    def chat(key):
        client = openai.OpenAI(base_url=url_with_key + "/v1", api_key=key, max_retries=0)
        return client.chat.completions.create(model="m", messages=ASK, extra_body=NO_THINKING).choices[0].message.content

    def message(**key):
        client = anthropic.Anthropic(base_url=url_with_key, max_retries=0, **key)
        return client.messages.create(model="m", max_tokens=50, messages=ASK).content[0].text

    with pytest.raises(openai.AuthenticationError):
        chat("none")
    with pytest.raises(anthropic.AuthenticationError):
        message(api_key="none")
    assert chat("secret-of-the-test") == "The capital of Japan is Tokyo."
    assert message(api_key="secret-of-the-test") == "The capital of Japan is Tokyo."
    assert message(auth_token="secret-of-the-test", api_key=None) == "The capital of Japan is Tokyo."
