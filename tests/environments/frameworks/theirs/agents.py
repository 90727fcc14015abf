"""Agents of other packages, unmodified, as a user names them in ``agent.client``."""

import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul, ast.Sub: operator.sub}


def evaluated(expression: str) -> str:
    tree = ast.parse(expression, mode="eval").body
    return str(OPERATORS[type(tree.op)](tree.left.value, tree.right.value))


def smol_tools(row, base_url, api_key, model):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def calculate(expression: str) -> str:
        """Calculate.

        Args:
            expression: two numbers and an operator
        """
        return evaluated(expression)

    llm = OpenAIServerModel(model, api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent([calculate], llm, max_steps=4, verbosity_level=0)
    return float(str(agent.run(row["messages"][-1]["content"])) == row["answer"])


def smol_code(row, base_url, api_key, model):
    from smolagents import CodeAgent, OpenAIServerModel

    llm = OpenAIServerModel(model, api_base=base_url, api_key=api_key)
    agent = CodeAgent([], llm, max_steps=4, verbosity_level=0)
    return float(str(agent.run(row["messages"][-1]["content"])) == row["answer"])


async def openai_agents(row, base_url, api_key, model, api="responses", streamed=False):
    from openai import AsyncOpenAI

    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)

    @function_tool
    def calculate(expression: str) -> str:
        """Calculate.

        Args:
            expression: two numbers and an operator
        """
        return evaluated(expression)

    kind = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}[api]
    llm = kind(model, AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = Agent("calculator", instructions="Use the tool.", tools=[calculate], model=llm)
    if streamed:
        result = Runner.run_streamed(agent, row["messages"][-1]["content"])
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, row["messages"][-1]["content"])
    return float(result.final_output == row["answer"])


def inspect_react(row, base_url, api_key, model):
    import tempfile

    from inspect_ai import Task
    from inspect_ai import eval as evaluate
    from inspect_ai.agent import react
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import match
    from inspect_ai.tool import tool

    @tool
    def calculate():
        async def execute(expression: str) -> str:
            """Calculate.

            Args:
                expression: two numbers and an operator
            """
            return evaluated(expression)

        return execute

    llm = get_model(f"openai-api/headway/{model}", base_url=base_url, api_key=api_key, memoize=False)
    sample = Sample(row["messages"][-1]["content"], target=row["answer"])
    task = Task([sample], solver=react(tools=[calculate()]), scorer=match())
    with tempfile.TemporaryDirectory() as logs:
        [log] = evaluate(task, model=llm, display="none", log_dir=logs)
    assert log.status == "success", log.error
    return log.results.scores[0].metrics["accuracy"].value
