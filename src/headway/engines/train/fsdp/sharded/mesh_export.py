"""Export of a model that lies on a mesh, as an ordinary Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from headway.engines.weights.outgoing_version import Window
from headway.engines.weights.safetensors_files import write_files
from headway.engines.weights.weight_layout import Manifest
from headway.models.model_export import replaced_when_complete
from headway.runtime.progress import progress_here


def export_windows(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    manifest: Manifest,
    windows: Iterable[Window],
    dtype: torch.dtype,
) -> None:
    """Write config, generation config, tokenizer and the weights of ``windows`` to ``path``; a folder that is there is
    replaced.

    ``lm`` is whose weights they are; ``dtype`` is theirs, for the config. The files are shards of at most 5 GB.
    """
    with replaced_when_complete(path) as folder, progress_here().writing(folder):
        write_files(folder, manifest, windows)
        config = copy.deepcopy(lm.config)
        config.dtype = dtype
        config.architectures = [type(lm).__name__]
        if lm.is_remote_code():
            custom_object_save(lm, folder, config=config)
        config.save_pretrained(folder)
        if lm.generation_config is not None:
            lm.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
