"""Chat messages to token ids and back: templates, tool calls, conversations."""
