"""Programs: user code that makes episodes by calling the policy. Imported where user code runs: no torch, no numpy."""
