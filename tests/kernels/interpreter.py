"""What Triton's interpreter gets wrong, mended for the checks."""

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch):
    """Do as a GPU does. Autouse, wherever a file imports it.

    It keeps bfloat16 as the bits of integers, rounds to it towards 0 and multiplies the bits.
    And older ones turn arrays of one element into integers in a way that numpy 2.4 ended.
    """
    from triton.runtime import interpreter

    builder, tensor_handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot, patch_tensor = builder.cast_impl, builder.create_dot, interpreter._patch_lang_tensor
    tl = interpreter.tl

    def rounding_cast(self, source, type_):
        if source.dtype.scalar == tl.float32 and type_.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            bits = rounded.view(torch.int16).numpy().view(np.uint16)
            return tensor_handle(bits.reshape(source.data.shape), tl.bfloat16)
        return cast(self, source, type_)

    def widening_dot(self, a, b, *rest):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(factor, tl.float32) for factor in (a, b))
        return dot(self, a, b, *rest)

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(builder, "cast_impl", rounding_cast)
    monkeypatch.setattr(builder, "create_dot", widening_dot)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
