"""The table of cosines and sines that `qkv_rope_store` reads, one row per position."""

import torch


def rope_table(
    frequencies: torch.Tensor, attention_factor: float, num_positions: int
) -> torch.Tensor:
    """Compute the rows of positions 0 to `num_positions` - 1, on the frequencies' device.

    A table instead of frequencies: a kernel that computed cosines of large angles would need a
    slow and exact reduction of them, in every layer. It takes `4 D` bytes per position, 16 MiB at
    32,768 positions of 128 channels.

    Args:
        frequencies: `[D / 2]` float32, the angle that each pair of channels turns per position.
        attention_factor: Multiplies all of them.
        num_positions: Rows; every position of a step must be below.

    Returns:
        `[num_positions, D]` float32: the cosines of a position, then its sines.
    """
    positions = torch.arange(num_positions, device=frequencies.device)
    angles = positions.float()[:, None] * frequencies
    return torch.cat((angles.cos() * attention_factor, angles.sin() * attention_factor), dim=-1)
