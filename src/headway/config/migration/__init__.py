"""``headway import``: files of other projects become a recipe, with a report of what became of each setting.

shell script, YAML, TOML, Python ─▶ settings by key ─▶ which project? ─▶ its table ─▶ recipe and report
  shell_scripts.py                  settings_files.py        translation.py      translation.py
  settings_files.py
  python_configs.py
"""
