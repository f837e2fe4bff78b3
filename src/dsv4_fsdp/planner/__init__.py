"""What a training run will need, before it is started: memory, collectives, activations (``dsv4-fsdp plan``).

settings             what was asked for, checked; imports no torch
run_config           the same from a training run's configuration file; imports no torch
model_sources        a preset, a config.json or a checkpoint folder -> the real model on the meta device
activations          what autograd keeps of each kind of block, measured by running it on fake tensors
memory               a plan and activations -> bytes per rank, by name, at each moment of a step
optimizer_state      what each of the trainer's optimizers keeps
communication        a plan and a cluster -> collectives and bytes per step, inside nodes and between them
simulation           the real ``fully_shard`` on a fake process group, to compare a plan with
fake_mesh            a mesh without other processes
estimate             all of these together for one configuration
hints, search        other configurations
render, picture      as text and as PNG
"""
