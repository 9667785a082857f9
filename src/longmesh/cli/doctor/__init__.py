"""`longmesh doctor`: is this machine fit to train on, and how fast is it? The first thing to run on GPUs.

finding  what is reported: a row of a table, right or wrong
machine  versions, devices, backends, settings that are known to hurt
links    collectives by size, like nccl-tests
kernels  attention kernels against float64, and their speed beside a matrix product's
ranks    every exchange on the ranks that are there
measured the figures as a `Cluster`
program  what each rank runs; `command` starts it
"""
