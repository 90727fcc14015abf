"""Episodes: what programs ask of the policy, and what becomes of it. Neither torch nor ray."""
