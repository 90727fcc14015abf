"""Other projects' settings and their counterparts here: a TOML table for each project. Data.

verl.toml  trl.toml  areal.toml  prime_rl.toml  openrlhf.toml     (….py: how their values are converted)
              └──────────────┬──────────────┐
   headway import: recipes of their files   messages about unknown keys
"""
