"""Leaf library: capture and replay of one step program per decode batch size.

It replays any callable over fixed buffers and does not know that `nanovllm` exists. Nothing is
here yet: bucket planning, the CUDA backend and the verifier come with the work on CUDA graphs.
"""
