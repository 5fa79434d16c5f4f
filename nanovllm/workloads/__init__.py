"""Workloads and what is measured of them: shared by `nanovllm bench`, the pytest plugin, `bench/`.

Importing it loads no torch. An engine comes in as an `LLM`; nothing here builds one.
"""
