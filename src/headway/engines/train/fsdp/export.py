"""Export of a model that lies on a mesh, as an ordinary Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from headway.models.export import replaced_when_complete
from headway.progress import progress_here
from headway.weights.layout import Manifest
from headway.weights.outgoing import Window
from headway.weights.safetensors_files import write_files


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
