"""Block kernels: partial attention of one rank and one stage, forward and backward.

choice = choose(need_of(q, v, score, blocks, needs_grad=True))       # a kernel, and why
state = choice.kernel.forward(KernelWork(q, k, v, blocks, score, where), state)  # once per stage
final = finish(out, lse, dout)                                       # after the last merge
choice.kernel.backward(KernelWork(q, k, v, blocks, score, where), final, gradients)  # once per stage
"""
