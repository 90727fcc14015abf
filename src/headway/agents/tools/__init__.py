"""Tools that a model may call: Python functions, MCP servers, verl's tools."""
