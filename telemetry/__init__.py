"""Leaf library: NVML and host sensors, recorder, memory ledger and reports.

It measures any process and does not know that `nanovllm` exists. Nothing is here yet.
"""
