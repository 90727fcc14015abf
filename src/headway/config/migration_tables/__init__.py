"""Names of other projects' settings, and what they are here: a table for each project. Data; nothing here acts on it.

verl.py  trl.py  areal.py  prime_rl.py  openrlhf.py     (…_values.py: how their values are converted)
              └──────────────┬──────────────┐
   headway import: recipes of their files   messages about unknown keys
"""
