"""A first recipe for a model and data: what ``headway init`` writes.

MODEL ─▶ `look_at_model` ─▶ ModelFacts ─┐
DATA  ─▶ `look_at_data`  ─▶ DataFacts  ─┼▶ `choose` ─▶ choices, each with its reason ─▶ `render` ─▶ YAML
here  ─▶ `look_here`     ─▶ Machine    ─┘
"""
