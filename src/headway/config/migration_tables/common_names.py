"""Names that several projects have, and that are of none of them in particular; for suggestions."""

from __future__ import annotations

from collections.abc import Mapping

USUAL: Mapping[str, tuple[str, ...]] = {
    "base_model": ("model.path",),
    "batch_size": ("actor.ppo_mini_batch_size",),
    "clip_range": ("actor.clip_ratio",),
    "cliprange": ("actor.clip_ratio",),
    "dataset": ("data.train",),
    "epochs": ("data.epochs",),
    "group_size": ("rollout.n",),
    "kl_coef": ("actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"),
    "log_with": ("reports.trackers",),
    "logger": ("reports.trackers",),
    "loggers": ("reports.trackers",),
    "lr": ("actor.optim.lr",),
    "lr_scheduler": ("actor.optim.lr_scheduler_type",),
    "max_new_tokens": ("data.max_response_length",),
    "max_tokens": ("data.max_response_length",),
    "micro_batch_size": ("actor.ppo_max_token_len_per_gpu",),
    "mlflow": ("reports.trackers",),
    "mlflow.experiment_name": ("reports.project",),
    "model": ("model.path",),
    "num_epochs": ("data.epochs",),
    "padding_free": ("model.packing",),
    "prometheus": ("reports.trackers",),
    "staleness": ("async_training.staleness_threshold",),
    "tensorboard": ("reports.trackers",),
    "tracker": ("reports.trackers",),
    "trackio": ("reports.trackers",),
    "use_prefix_grouper": ("model.packing",),
    "use_remove_padding": ("model.packing",),
    "use_tensorboard": ("reports.trackers",),
    "use_wandb": ("reports.trackers",),
    "wandb": ("reports.trackers",),
    "wandb.name": ("reports.run_name",),
    "wandb.project": ("reports.project",),
    "wandb_project": ("reports.project",),
    "wandb_run_name": ("reports.run_name",),
}
"""Names, whole or the last part of one → the nearest keys here."""
