"""The tool of ``lookup.py`` as verl has tools: a class, which ``lookup_verl.yaml`` names. Each call costs a little."""

from lookup import value

COST = 0.01


class LookUp:
    def __init__(self, config, tool_schema=None):
        parameters = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
        function = {"name": "look_up", "description": "Look a key up in the table.", "parameters": parameters}
        self.tool_schema = tool_schema or {"type": "function", "function": function}

    async def execute(self, instance_id, parameters, **kwargs):
        return str(value(parameters["key"])), -COST, {"looked_up": 1}
