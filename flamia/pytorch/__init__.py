"""Attention as PyTorch operators: what lies behind `flamia.attention`.

`arguments` checks, `operators` holds the custom operators and their derivative, `cpu` computes them with the reference,
`saved` says what the forward keeps for the backward, `exchange` passes tensors to NumPy and back.
"""
