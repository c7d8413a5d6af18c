"""Attention as PyTorch operators: what lies behind `flamia.attention`.

`call` chooses what computes, `arguments` checks, `operators` holds the custom operators and their derivative. `cpu`
computes them with the reference: `saved` says what its forward keeps for the backward, `exchange` passes tensors to
NumPy and back. `hopper` and `blackwell` are the kernels' rows in the table of `flamia.dispatch`; `tiles` is what
those keep.
"""
