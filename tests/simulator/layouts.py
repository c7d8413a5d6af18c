"""Address formulas of shared-memory operands, written as scalars from the PTX text: the tests' own."""

import numpy as np

WIDTHS = {0: 16, 2: 128, 4: 64, 6: 32}


def tcgen05(start, lbo, sbo, mode, base=0, version=1):
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | version << 46 | base << 49 | mode << 61


def wgmma(start, lbo, sbo, mode, base=0):
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | base << 49 | mode << 62


def expect_address(start, lbo, sbo, width, mn_major, row, k, size):
    """The byte address of element (row, k) by the CuTe table of PTX, in units of T = 16 bytes."""
    per_unit = 16 // size  # T elements
    if not mn_major:
        unit, inside = divmod(k, per_unit)
        if width == 16:  # ((8,m),(T,2k)) : ((1T,SBO),(1,LBO))
            offset = (row % 8) * 16 + (row // 8) * sbo + unit * lbo + inside * size
        else:  # ((8,m),(T,2k)) : ((W,SBO),(1,T))
            offset = (row % 8) * width + (row // 8) * sbo + unit * 16 + inside * size
    else:
        unit, inside = divmod(row, per_unit)
        if width == 16:  # ((T,1,m),(8,k)) : ((1,T,SBO),(1T,LBO))
            offset = inside * size + unit * sbo + (k % 8) * 16 + (k // 8) * lbo
        else:  # ((T,W,m),(8,k)) : ((1,T,LBO),(W,SBO))
            units = width // 16
            offset = inside * size + (unit % units) * 16 + (unit // units) * lbo + (k % 8) * width + (k // 8) * sbo
    address = start + offset
    bits = {16: 0, 32: 1, 64: 2, 128: 3}[width]
    for bit in range(bits):  # Swizzle<bits, 4, 3>
        address ^= (address >> (7 + bit) & 1) << (4 + bit)
    return address


def place(image, raw, start, lbo, sbo, width, mn_major, size):
    """Write a matrix of elements into an image of shared memory.

    :param image: uint8, of which index 0 is shared-memory address 0.
    :param raw: uint8 ``(rows, K * size)``: bytes of each row along K.
    """
    for row in range(raw.shape[0]):
        for byte in range(raw.shape[1]):
            k, part = divmod(byte, size)
            image[expect_address(start, lbo, sbo, width, mn_major, row, k, size) + part] = raw[row, byte]


def scale_block(table):
    """The 512 bytes of a scale block: uint8 ``(128, 4)`` row by K-block."""
    block = np.zeros(512, np.uint8)
    for row in range(128):
        for k in range(4):
            block[row % 32 * 16 + row // 32 * 4 + k] = table[row, k]
    return block
