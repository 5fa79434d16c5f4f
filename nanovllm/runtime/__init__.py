"""Where core values meet tensors: executor, inputs, K/V cache, sampler."""
