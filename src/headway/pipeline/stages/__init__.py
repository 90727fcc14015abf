"""The stages of the pipeline: the boxes of the picture in `headway.pipeline.run`."""
