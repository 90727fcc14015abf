"""Names of other projects' settings, and what they are here: a table for each project in TOML. Data.

verl.toml  trl.toml  areal.toml  prime_rl.toml  openrlhf.toml     (….py: how their values are converted)
              └──────────────┬──────────────┐
   headway import: recipes of their files   messages about unknown keys
"""
