"""Frameworks for agents: openai-agents and pydantic-ai."""
import asyncio
import os

import openai
import pytest
from pydantic import BaseModel

os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")  # or it would report to a service

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = '{"temperature": 20, "condition": "sunny"}'


class Person(BaseModel):
    name: str
    age: int


MILA = "Give me a JSON object with the keys name and age for Mila, who is 30 years old."


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(url, api):
    import agents

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the current weather for a city.

        Args:
            city: The name of the city.
        """
        assert city == "Paris"
        return WEATHER

    async def run():
        client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        agent = agents.Agent(name="test", model=kind(model="lily-tiny", openai_client=client), tools=[get_weather],
                             model_settings=agents.ModelSettings(extra_body=NO_THINKING if api == "chat" else {"reasoning": {"effort": "none"}}))
        whole = (await agents.Runner.run(agent, "What is the weather in Paris?")).final_output
        streamed = agents.Runner.run_streamed(agent, "What is the weather in Paris?")
        events = [event.type async for event in streamed.stream_events()]
        assert "run_item_stream_event" in events
        return whole, streamed.final_output

    for answer in asyncio.run(run()):
        assert "sunny" in answer and "20" in answer


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_pydantic_ai(url, api):
    from pydantic_ai import Agent
    if api == "openai":
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider
        model = OpenAIChatModel("lily-tiny", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
        settings = {"extra_body": NO_THINKING}
    else:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider
        model = AnthropicModel("lily-tiny", provider=AnthropicProvider(base_url=url, api_key="none"))
        settings = {}
    agent = Agent(model, model_settings=settings)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the current weather for a city.

        Args:
            city: The name of the city.
        """
        assert city == "Paris"
        return WEATHER

    result = agent.run_sync("What is the weather in Paris?")
    assert "sunny" in result.output and "20" in result.output


def test_pydantic_ai_structured(url):
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    model = OpenAIChatModel("lily-tiny", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
    agent = Agent(model, output_type=NativeOutput(Person), model_settings={"extra_body": NO_THINKING})
    assert agent.run_sync(MILA).output == Person(name="Mila", age=30)
