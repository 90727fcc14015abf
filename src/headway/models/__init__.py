"""Making, opening and writing models, and log-probs without holding all logits."""
