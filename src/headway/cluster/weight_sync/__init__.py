"""The driver's view of a weight update: who is connected to whom, and what each copy holds."""
