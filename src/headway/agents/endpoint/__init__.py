"""The HTTP endpoint at which agents ask for turns of the policy."""
