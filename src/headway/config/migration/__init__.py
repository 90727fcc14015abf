"""``headway import``: files of other projects become a recipe, with a report of what became of each setting.

shell script, YAML, TOML, Python ─▶ settings by key ─▶ which project? ─▶ its table ─▶ recipe and report
  scripts.py  reading.py  code.py      reading.py            translation.py         recipe.py  report.py
"""
