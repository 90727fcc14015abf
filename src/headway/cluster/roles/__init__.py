"""Roles: the work of one rank of the cluster, the same on every backend. Independent of Ray.

    ActorRole      a training rank: engine, reference and critic (where they share the ranks), sender of weights
    RolloutRole    one replica: engine, receiver of weights
    FusedRole      both of them in one process, on a device that they share
    RefRole        a rank of the reference policy, where it has ranks of its own
    LogpRole       a rank that recomputes log-probs, where that has ranks of its own: receiver of weights
    CriticRole     a rank of the critic, where it has ranks of its own

Creating a role is cheap; `build` loads it, because torch must be imported after the process was set up. So imports of
torch, and of modules that import it, stand inside methods.
"""
