"""``headway eval``: a model's quality on data, measured with training's engine and rewards.

MODEL, DATA, a.b=c ─▶ settings ─▶ Config ─▶ answers: prompts ─▶ engine ─▶ reward ─▶ figures: accuracy, pass@k, lengths
"""
