"""Memory of the weights: apart from each other, aligned, and in huge pages where there are any."""

import re
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.runtime.native.arena import ALIGNMENT_BYTES, CHUNK_BYTES, Arena


def test_pieces_keep_what_is_written_to_them():
    arena = Arena()
    shapes = [(3, 5), (1, 64), (7, 1000), (2, 1), (1, CHUNK_BYTES + 1), (4, 4)]
    pieces = [arena.empty(*shape) for shape in shapes]
    for number, piece in enumerate(pieces):
        piece.view(-1)[:10_000].fill_(number)

    for number, (shape, piece) in enumerate(zip(shapes, pieces, strict=True)):
        assert piece.shape == shape
        assert piece.is_contiguous()
        assert piece.data_ptr() % ALIGNMENT_BYTES == 0
        assert (piece.view(-1)[:10_000] == number).all()


def test_a_piece_outlives_its_arena():
    piece = Arena().empty(4, 1 << 20)
    piece.fill_(7)

    assert torch.equal(piece, torch.full_like(piece, 7))


def huge_bytes(address):
    """Bytes in huge pages of the mapping that an address lies in."""
    begins_mapping = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            begins_mapping = int(span[1], 16) <= address < int(span[2], 16)
        elif begins_mapping and line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no such mapping")


def has_huge_pages():
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return sys.platform == "linux" and path.exists() and "[never]" not in path.read_text()


@pytest.mark.skipif(not has_huge_pages(), reason="this system gives no huge pages")
def test_what_is_written_lies_in_huge_pages():
    piece = Arena().empty(1, 64 << 20)
    piece.fill_(1)

    # Not all: the system may be short of them.
    assert huge_bytes(piece.data_ptr() + (32 << 20)) > 16 << 20
