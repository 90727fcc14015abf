"""``headway eval``: how good a model is on data, measured with what training measures with.

MODEL, DATA, a.b=c ─▶ settings ─▶ Config ─▶ answers: prompts ─▶ engine ─▶ reward ─▶ figures: accuracy, pass@k, lengths
"""
