"""Runs of training: from a config to a folder that holds what it found. Needs the extra `train`.

config       Config, change                            what a run is asked to do, completely
tasks        load(config) -> TaskData                  the data of a config (`lln.lab.data`), and what a guess scores
models       build                                     the model of a config
run          train                                     all of it, going on where it stopped
loop         Loop                                      steps; graph: as one CUDA graph; shard: spread by FSDP
objective    what a model learns from a batch; recording: what its layers do meanwhile
run_folder   Run                                       the run's folder
"""
