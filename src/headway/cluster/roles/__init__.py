"""Roles: what one rank of the cluster does, the same on every backend. Nothing here knows Ray.

    ActorRole      a training rank: engine, reference and critic (where they share the ranks), sender of weights
    RolloutRole    one replica: engine, receiver of weights
    FusedRole      both of them in one process, on a device that they share
    RefRole        a rank of the reference policy, where it has ranks of its own
    LogpRole       a rank that recomputes log-probs, where that has ranks of its own: receiver of weights
    CriticRole     a rank of the critic, where it has ranks of its own

A role is made cheaply and then built, because torch must be imported after its process was set up: imports of torch and
of what imports it stand inside the methods.
"""
