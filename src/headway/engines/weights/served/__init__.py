"""A copy of the policy that is served and receives new weights: by a rollout replica, or by the role ``logp``.

| file | what |
|---|---|
| `weights` | the tensors that are served, and whether they may be computed with |
| `update` | how new ones come: beside those that are served, or over them |
| `memory` | their memory, which a sleeping engine gives back |
"""
