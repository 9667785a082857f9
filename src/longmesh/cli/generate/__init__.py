"""`longmesh generate`: a prompt of any length over local ranks, with a model of transformers.

command.py     the command line, and the start of the ranks
program.py     what each rank runs
models.py      the model that was named, or a tiny random one; the prompt's tokens
report.py      tokens as they come, and the figures at the end
"""
