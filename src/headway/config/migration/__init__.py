"""``headway import``: conversion of other projects' files to a recipe, with a report on each setting.

shell script, YAML, TOML, Python ─▶ settings by key ─▶ which project? ─▶ its table ─▶ recipe and report
  shell_scripts.py                  settings_files.py        translation.py      translation.py
  settings_files.py
  python_configs.py
"""
