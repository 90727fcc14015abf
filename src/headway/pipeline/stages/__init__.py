"""The stages of the pipeline, one file per box of the picture in `headway.pipeline.run`."""
