"""Making, opening and writing models, and log-probs without the logits."""
