"""The model as the native engine runs it: forward passes, attention, recorded steps."""
